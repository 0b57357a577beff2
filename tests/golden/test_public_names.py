"""What users import: every public name with its signature."""

from golden.comparing import compare
from golden.signatures import PUBLIC, render


def test_the_public_names_and_their_signatures_stay() -> None:
    """All modules in one test: each process that runs one of them would import everything."""
    differences = []
    for module in PUBLIC:
        try:
            compare(f"names-{module}.txt", "\n".join(render(module)))
        except AssertionError as error:
            differences.append(str(error))
    assert not differences, "\n\n".join(differences)
