"""The pages: generated parts are up to date, commands run, and links lead somewhere."""

from __future__ import annotations

import csv
import importlib.util
import re
import sys
from pathlib import Path

import conftest
import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
DOCS, README = ROOT / "docs", ROOT / "README.md"
_spec = importlib.util.spec_from_file_location("make_pages", DOCS / "make_pages.py")
make_pages = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = make_pages  # dataclasses look for their module here
_spec.loader.exec_module(make_pages)
measured_tables = sys.modules["measured_tables"]


@pytest.mark.parametrize("page", make_pages.PAGES)
def test_generated_parts_are_up_to_date(page):
    assert (DOCS / page).read_text() == make_pages.with_generated_parts(page), "run `make docs`"


def test_a_page_without_markers_is_named(tmp_path, monkeypatch):
    (tmp_path / "page.md").write_text("<!-- generated: part -->\n")
    monkeypatch.setattr(make_pages, "DOCS", tmp_path)
    monkeypatch.setitem(make_pages.PAGES, "page.md", {"part": lambda: "text"})
    with pytest.raises(ValueError, match="docs/page.md needs the lines .*end of part"):
        make_pages.with_generated_parts("page.md")


def test_a_family_without_figures_is_named(tmp_path, monkeypatch):
    lines = make_pages.GOLDEN.read_text().splitlines(keepends=True)
    (tmp_path / "golden.csv").write_text("".join(line for line in lines if not line.startswith("gpt2,")))
    monkeypatch.setattr(make_pages, "GOLDEN", tmp_path / "golden.csv")
    with pytest.raises(ValueError, match="no figures of .*gpt2.*: run `make test-full .*--record-golden"):
        make_pages.golden_matrix()


def test_new_figures_take_the_place_of_old_ones(tmp_path):
    path = tmp_path / "golden.csv"
    row = dict.fromkeys(conftest.GOLDEN_COLUMNS, "x") | {"architecture": "b", "dtype": "float16", "error": "1"}
    conftest.merge_golden(path, [row, row | {"dtype": "float32"}])
    conftest.merge_golden(path, [row | {"error": "2"}, row | {"architecture": "a", "error": "3"}])
    lines = path.read_text().splitlines()
    assert [line.split(",")[4] for line in lines[1:]] == ["3", "1", "2"] and len(lines) == 4


def test_work_without_a_row_is_named(monkeypatch):
    work = measured_tables.Work("Mistral-7B", "fp16", 129)
    machine = measured_tables.Machine("NVIDIA H200", ("generate_h200.csv",), (work,))
    monkeypatch.setitem(measured_tables.MACHINES, "mine", machine)
    with pytest.raises(ValueError, match="generate_h200.csv have no row of .*context=129.* on NVIDIA H200"):
        measured_tables.measured("mine")


def test_a_line_is_ours_last_row_beside_others_of_its_commit(tmp_path, monkeypatch):
    """Without a row of that commit, ours stands beside the fastest row of the other engine, with a mark."""
    columns = "date,device,commit,model,dtype,context,batch,engine,decode_tok_s,percent_of_r,r_gb_s,torch,transformers"
    rows = (
        "2026-01-02,card,b,M,fp16,8,1,ours,40,80.0,1000,2,5",
        "2026-01-02,card,b,M,fp16,8,1,stock,10,20.0,1000,2,5",
        "2026-01-01,card,a,M,fp16,8,1,ours,50,99.0,1000,2,5",
        "2026-01-01,card,a,M,fp16,8,1,stock,20,40.0,1000,2,5",
        "2026-01-01,card,a,M,fp16,8,1,static,30,60.0,1000,2,5",
        "2026-01-03,card,c,M,fp16,8,1,static,25,60.0,1000,2,5",
        "2026-01-03,another,c,M,fp16,8,1,ours,90,60.0,1000,2,5",
    )
    (tmp_path / "generate.csv").write_text("\n".join((columns, *rows)) + "\n")
    monkeypatch.setattr(measured_tables, "DATA", tmp_path)
    work = measured_tables.Work("M", "fp16", 8)
    monkeypatch.setitem(measured_tables.MACHINES, "mine", measured_tables.Machine("card", ("generate.csv",), (work,)))
    line = measured_tables.measured("mine").splitlines()[2]
    assert line == "| decode | M | fp16 | 8 | 1 | 10.0 | 30.0† static | **40.0** | 4.00 | 80.0 | card, b |"


#: the comment in the header of a kernel's folder
LAB_LINK = re.compile(r"^// Experiments: docs/lab/(\S+)$", flags=re.M)

# ---- links; tests/test_places.py runs what the pages tell to run -------------------------------------------


ALL_PAGES = (README, *sorted(DOCS.rglob("*.md")))


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_site_has_every_page():
    def pages(entries):
        for entry in entries:
            (page,) = entry.values()
            yield from [page] if isinstance(page, str) else pages(page)

    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_lab_pages_are_listed_and_linked():
    """The index has each page, and a kernel's header names only pages that exist."""
    pages = {path.name for path in (DOCS / "lab").glob("*.md")} - {"index.md"}
    assert set(re.findall(r"\]\(([a-z_]+\.md)\)", (DOCS / "lab" / "index.md").read_text())) == pages
    named = {name for path in (ROOT / "csrc").rglob("*.h") for name in LAB_LINK.findall(path.read_text())}
    assert named and named <= pages


def test_lab_pages_are_dated_experiments():
    """How things work is in docs/design and ARCHITECTURE.md, which are kept true; an experiment has a date."""
    undated = {}
    for page in (DOCS / "lab").glob("*.md"):
        named = [head for head in re.findall(r"^## (.+)", page.read_text(), flags=re.M) if "(202" not in head]
        undated |= {page.name: left} if (left := set(named) - UNDATED) else {}
    assert not undated


#: headings of experiments whose paragraphs have the dates
UNDATED = {"CPU", "Prompts of mixtures", "Rejected"}


def test_performance_is_short():
    """What was tried belongs into docs/lab."""
    assert len((DOCS / "performance.md").read_text().splitlines()) <= 250


@pytest.mark.parametrize("module", re.findall(r"^::: (\S+)", (DOCS / "api.md").read_text(), flags=re.M))
def test_api_page_names_what_there_is(module):
    owner, _, name = module.rpartition(".")
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        assert hasattr(importlib.import_module(owner), name)


# ---- plots ------------------------------------------------------------------------------------------------


def texts(picture: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", picture)


@pytest.mark.parametrize("path", sorted((DOCS / "plots").glob("*.svg")), ids=lambda path: path.stem)
def test_pictures_fit_a_page(path):
    """A page has 900 pixels, and a pixel is three quarters of a point."""
    (width,) = re.findall(r'<svg[^>]* width="([\d.]+)pt"', path.read_text())
    assert float(width) / 0.75 <= 900


@pytest.fixture
def plot(monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("plot")


def test_picture_of_the_readme_is_drawn_from_the_data(plot, tmp_path):
    drawn = plot.plot_speed(ROOT / "benchmarks" / "data", tmp_path / "speed.svg").read_text()
    assert texts(drawn) == texts((DOCS / "plots" / "speed.svg").read_text()), "run benchmarks/plot.py"
    with (ROOT / "benchmarks" / "data" / "peers.csv").open(newline="") as handle:
        for row in csv.DictReader(handle):
            speed, limit = float(row["decode_tok_s"]), float(row["limit_tok_s"])
            assert f"{plot._short(str(speed))} tok/s, {100 * speed / limit:.0f} %" in texts(drawn)
            assert float(row["percent_of_r"]) == pytest.approx(100 * speed / limit, abs=0.1)


@pytest.mark.parametrize(
    "device", [path.stem.removeprefix("decode_") for path in (DOCS / "plots").glob("decode_*.svg")]
)
def test_pictures_of_machines_are_drawn_from_the_data(plot, tmp_path, device):
    drawn = plot.plot_decode(
        ROOT / "benchmarks" / "data" / f"generate_{device}.csv", tmp_path / "decode.svg"
    ).read_text()
    assert texts(drawn) == texts((DOCS / "plots" / f"decode_{device}.svg").read_text()), "run benchmarks/plot.py"


def test_picture_needs_its_rows(plot, tmp_path):
    for name in plot.SPEED_FILES:
        lines = (ROOT / "benchmarks" / "data" / name).read_text().splitlines(keepends=True)
        (tmp_path / name).write_text("".join(line for line in lines if ",ours," not in line or "H100" not in line))
    with pytest.raises(ValueError, match="H100.*found rows of .*static.*expected ours and another"):
        plot.plot_speed(tmp_path, tmp_path / "speed.svg")


def test_labels_do_not_overlap(plot, tmp_path, monkeypatch):
    """In a picture of bars, no two texts share a point, and all texts lie inside."""
    figures = []
    monkeypatch.setattr(plot, "_save", lambda figure, path, bbox=None: figures.append(figure) or path)
    plot.plot_speed(ROOT / "benchmarks" / "data", tmp_path / "speed.svg")
    plot.plot_decode(ROOT / "benchmarks" / "data" / "generate_h200.csv", tmp_path / "decode.svg")
    plot.plot_decode(ROOT / "benchmarks" / "data" / "generate_cpu.csv", tmp_path / "decode.svg")
    for figure in figures:
        figure.canvas.draw()
        found = [text for text in figure.findobj(plot.matplotlib.text.Text) if text.get_visible()]
        boxes = [(text.get_text(), text.get_window_extent()) for text in found if text.get_text().strip()]
        assert len(boxes) > 15
        for at, (name, box) in enumerate(boxes):
            assert box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y0 >= 0 and box.y1 <= figure.bbox.height, name
            for other, other_box in boxes[at + 1 :]:
                assert not box.overlaps(other_box), f"{name!r} lies over {other!r}"
        plot.pyplot.close(figure)
