"""Reads the text that Prometheus scrapes."""

from prometheus_client.parser import text_string_to_metric_families


def families(text: str) -> list[str]:
    """The metrics of an exposition: kind, name, labels, and the names of the samples."""
    lines = []
    for family in text_string_to_metric_families(text):
        if family.type == "gauge" and family.name.endswith("_created"):
            continue  # when a counter began: prometheus-client's own, beside each of ours
        labels = sorted({label for sample in family.samples for label in sample.labels})
        names = sorted({sample.name for sample in family.samples}) or ["no samples"]
        lines.append(f"{family.type} {family.name}{{{', '.join(labels)}}}: {', '.join(names)}")
    return sorted(lines)
