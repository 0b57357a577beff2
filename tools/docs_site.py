"""A hook of MkDocs: pages of the repository that are not in docs/ become part of the site, and links follow them.

The site has a folder for each version that was built into it, and a list of them from which readers choose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ADDED = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/data_intake/README.md": "example-data-intake.md",
    "examples/message_router/README.md": "example-message-router.md",
}
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?://|#)([^)\s#]+)(#[^)\s]*)?\)")
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>~?")
_LIST = re.compile(r"^(\*\*.+\*\*)\n(?=- )", re.MULTILINE)
"""A list that follows a line at once, as in the changelog: MkDocs wants an empty line between them."""
_FENCE = re.compile(r"^```\w*\n.*?^```$", re.MULTILINE | re.DOTALL)


_VERSION = re.compile(r"\d+\.\d+")
_REDIRECT = """<!doctype html>
<meta charset="utf-8">
<title>semel</title>
<meta http-equiv="refresh" content="0; url={}/index.html">
"""


def on_startup(command: str, **_: object) -> None:
    """Note whether pages are built or only shown."""
    global _builds  # noqa: PLW0603 -- one for each process
    _builds = command == "build"


_builds = False


def on_config(config: MkDocsConfig) -> None:
    """Show the version beside the name, and build into a folder of its own."""
    found = re.search(r'^version = "((\d+\.\d+)\..+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    config.site_name = f"{config.site_name} {found[1]}"
    if _builds:
        config.site_dir = str(Path(config.site_dir) / found[2])


def on_post_build(config: MkDocsConfig) -> None:
    """List the versions of the site for the theme's menu, and lead from its root to the newest."""
    if not _builds:
        return
    site = Path(config.site_dir).parent
    found = sorted((each.name for each in site.iterdir() if _VERSION.fullmatch(each.name)), key=_numbers, reverse=True)
    listed = [{"version": each, "title": each, "aliases": []} for each in found]
    (site / "versions.json").write_text(json.dumps(listed))
    (site / "index.html").write_text(_REDIRECT.format(found[0]))


def _numbers(version: str) -> list[int]:
    return [int(each) for each in version.split(".")]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages from outside docs/."""
    for source, target in ADDED.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text()))


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Let links lead to pages of the site; one to anything else, such as a source file, becomes its text."""
    sources = {target: source for source, target in ADDED.items()}
    origin = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def follow(link: re.Match[str]) -> str:
        target = _resolved(PurePosixPath(origin).parent / link[2])
        if target.startswith("docs/"):
            return f"[{link[1]}]({target.removeprefix('docs/')}{link[3] or ''})"
        if target in ADDED:
            return f"[{link[1]}]({ADDED[target]}{link[3] or ''})"
        return link[1]

    return _outside_code(_LIST.sub(r"\1\n\n", markdown), follow)


def on_page_content(html: str, **_: object) -> str:
    """Docstrings have the roles of Sphinx, such as :meth:`guard`: only the name is shown."""
    return _ROLE.sub("<code>", html)


def _resolved(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def _outside_code(markdown: str, follow: Callable[[re.Match[str]], str]) -> str:
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(follow, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(follow, markdown[end:])])
