"""What users import: every public name with its signature."""

import pytest

from golden.comparing import compare
from golden.signatures import PUBLIC, render


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_names_and_their_signatures_stay(module: str) -> None:
    compare(f"names-{module}.txt", "\n".join(render(module)))
