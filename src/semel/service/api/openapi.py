"""The OpenAPI schemas of the responses that clients decode leniently: precise names, types and required fields."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from litestar.openapi.spec.schema import SchemaDataContainer
from litestar.plugins import OpenAPISchemaPlugin
from litestar.typing import FieldDefinition
from msgspec import NODEFAULT, UNSET, Meta, Struct, defstruct, field
from msgspec.structs import fields

from semel import api_types
from semel.api_types import DocumentedAs

_NAMES: dict[type[Struct], str] = {
    api_types.JobAnswer: "JobAnswer",
    api_types.RemoteArtifact: "ArtifactView",
    api_types.RemoteConfig: "ConfigView",
    api_types.RemoteCostLimit: "CostLimit",
    api_types.RemoteCosts: "CostStatus",
    api_types.RemoteJob: "JobView",
    api_types.RemoteLogLine: "LogLineView",
    api_types.RemoteModel: "ModelView",
    api_types.RemoteRun: "RunView",
    api_types.RemoteStep: "StepView",
    api_types.RemoteSummary: "SummaryView",
    api_types.RemoteUpload: "UploadView",
    api_types.RemoteWaiting: "WaitingView",
    api_types.RemoteWorker: "WorkerView",
}
_OPTIONAL_FIELDS = {api_types.RemoteConfig}
"""Types whose fields with a default stay optional in the schema."""


class ResponseSchemas(OpenAPISchemaPlugin):
    """Documents each lenient type as the strict struct that the server writes."""

    def is_plugin_supported_field(self, field_definition: FieldDefinition) -> bool:
        return field_definition.annotation in _NAMES

    def to_openapi_schema(self, field_definition: FieldDefinition, schema_creator: Any) -> Any:  # noqa: ARG002 -- Litestar's
        return SchemaDataContainer(data_container=_documented(field_definition.annotation))


@cache
def _documented(kind: type[Struct]) -> type[Struct]:
    """The struct with the documented types, where every field that is always sent is required."""
    hints = get_type_hints(kind, include_extras=True)
    return defstruct(
        _NAMES[kind],
        [(each.encode_name, _documented_type(hints[each.name]), _default(kind, each)) for each in fields(kind)],
        kw_only=True,
        module=kind.__module__,
    )


def _documented_type(hint: Any) -> Any:
    if get_origin(hint) is not Annotated:
        return hint
    plain, *notes = get_args(hint)
    documented = next((note.type for note in notes if isinstance(note, DocumentedAs)), plain)
    metas = tuple(note for note in notes if isinstance(note, Meta))
    return Annotated[(documented, *metas)] if metas else documented


def _default(kind: type[Struct], each: Any) -> Any:
    if each.required or (kind not in _OPTIONAL_FIELDS and each.default is not UNSET):
        return NODEFAULT
    return field(default_factory=each.default_factory) if each.default is NODEFAULT else each.default
