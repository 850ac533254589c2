"""MkDocs hook: a repository file that a page links to becomes part of the site, under source/.

So one relative link works in the repository and on the site, and `mkdocs build --strict` checks
both.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
CODE_IN_CELL = re.compile(r"(?<=<td><code>)[^<]+(?=</code></td>)")
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)")  # the path of a Markdown link, without its anchor
ALWAYS = (ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md")


def source_uri(path: Path) -> str:
    """Where a file of the repository is in the site's sources."""
    return (
        path.relative_to(DOCS).as_posix()
        if path.is_relative_to(DOCS)
        else f"source/{path.relative_to(ROOT)}"
    )


def linked(document: Path) -> Iterator[Path]:
    """Existing repository files outside docs/ that a document links to."""
    for link in LINK.findall(document.read_text()):
        target = (document.parent / link).resolve()
        if target.is_file() and target.is_relative_to(ROOT) and not target.is_relative_to(DOCS):
            yield target


def on_files(files: Files, config: MkDocsConfig) -> Files:
    todo = [
        *ALWAYS,
        *(
            path
            for file in files.documentation_pages()
            for path in linked(Path(file.abs_src_path or ""))
        ),
    ]
    seen = set()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        files.append(File.generated(config, source_uri(path), abs_src_path=str(path)))
        if path.suffix == ".md":
            todo += linked(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here, folder = Path(page.file.abs_src_path or DOCS), posixpath.dirname(page.file.src_uri)

    def resolve(match: re.Match[str]) -> str:
        target = (here.parent / match[1]).resolve()
        known = target.is_file() and target.is_relative_to(ROOT)
        return posixpath.relpath(source_uri(target), folder or ".") if known else match[1]

    return LINK.sub(resolve, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """On a narrow screen a long name in a table may break after a slash or an underscore."""
    return CODE_IN_CELL.sub(lambda match: re.sub(r"([/_])", r"\1<wbr>", match[0]), html)
