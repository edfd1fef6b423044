"""The reader of pages: what counts as a block, a link and a heading."""

import pytest

from support import pages

TEXT = """\
# A page of `one`

See [this](other.md#that), `[not](this)` and ![a picture](a.svg).

```python
x = 1
```

* an item

  ```python
  x += 1
  ```

<!-- not run: it needs a GPU -->

```python
y = [1](2)
```

```python
# ranks: 3
z = 1
```

<!-- run -->
```sh
true
```

```{include} other.md
```

## A page of one
"""


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(TEXT)
    return pages.read(path)


def test_blocks_know_their_lines_and_how_they_run(page):
    found = [(block.language, block.line, block.ranks, block.reason, block.comment) for block in page.blocks]
    assert found == [
        ("python", 6, None, None, ""),
        ("python", 12, None, None, ""),
        ("python", 18, None, "it needs a GPU", "not run: it needs a GPU"),
        ("python", 22, 3, None, ""),
        ("sh", 28, None, None, "run"),
    ]


def test_the_program_of_a_page_has_its_lines_where_the_page_has_them(page):
    lines = page.program.splitlines()
    assert {number: line for number, line in enumerate(lines, 1) if line} == {6: "x = 1", 12: "x += 1"}


def test_links_are_found_in_prose_alone(page):
    assert page.links == [(3, "other.md#that"), (3, "a.svg")]


def test_headings_become_anchors_and_equal_ones_are_numbered(page):
    assert page.anchors == {"a-page-of-one", "a-page-of-one-1"}


def test_a_block_that_does_not_end_is_named(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("```python\nx = 1\n")
    with pytest.raises(AssertionError, match=r"page\.md: the block of \['x = 1'\] does not end"):
        pages.read(path)
