"""Site, report and plan in a real browser: nothing is cut off at 390 pixels, no script fails, nothing is fetched."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.planner.cluster.catalog import known_clusters, known_models
from phalanx.planner.model.recipe import Recipe
from phalanx.planner.search.answer import answer_question
from phalanx.planner.search.question import Question
from phalanx.report import write_report
from phalanx.report.plan_page import write_plan

ROOT = Path(__file__).resolve().parents[2]
HAS_MKDOCS = all(importlib.util.find_spec(name) for name in ("mkdocs", "material", "mkdocstrings"))
WIDTHS = (1280, 390)


def module_of(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


browser_script = module_of(ROOT / "scripts" / "browser.py")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser_script.installed() is None, reason="no Chromium is installed"),
]


@pytest.fixture(scope="module")
def browser():
    with browser_script.Browser() as one:
        yield one


def faults(browser, page, widths=WIDTHS):
    """What is wrong with a page, by width and colours."""
    shown = {(width, dark): browser.show(page, width, dark=dark) for width in widths for dark in (False, True)}
    return {key: found for key, found in shown.items() if found != browser_script.ShownPage()}


def test_the_browser_tells_each_kind_of_fault(browser, tmp_path):
    page = tmp_path / "faulty.html"
    page.write_text(
        "<!doctype html><meta name=viewport content='width=device-width'><body>"
        "<p style='width:700px'>wide</p><div style='overflow:auto'><p style='width:900px'>may be scrolled</p></div>"
        "<img src='https://example.org/seen.png'><script>console.error('told'); missing.call()</script>"
    )

    found = browser.show(page, 390)

    assert [re.sub(r" \d+\.\.\d+", "", one) for one in found.wider] == ["p.", "the page is 708 wide"]
    assert found.outside == ["https://example.org/seen.png"]
    assert any("told" in one for one in found.complaints) and any("missing" in one for one in found.complaints)
    assert browser.show(page, 1280).wider == []


def test_a_report_fits_on_every_screen(browser, tmp_path):
    run = module_of(ROOT / "tests" / "report" / "made_run.py").make_run(tmp_path / "run")

    assert faults(browser, write_report(run)) == {}
    assert browser.evaluate("document.querySelectorAll('svg').length") >= 3


@pytest.mark.parametrize(("model", "cluster", "count"), [("gpt2", "a100-nodes", 8), ("llama-2-70b", "llama2-rsc", 512)])
def test_a_plan_fits_on_every_screen(browser, tmp_path, model, cluster, count):
    recipe = Recipe(512, 4096, precision="bf16") if count > 8 else Recipe(32, 1024, precision="bf16")
    asked = Question(model, known_models()[model], recipe, known_clusters()[cluster], (count,))
    page = tmp_path / "plan.html"
    write_plan(page, answer_question(asked))

    assert faults(browser, page) == {}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    built = tmp_path_factory.mktemp("built") / "site"
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(built)],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    return built


@pytest.mark.skipif(not HAS_MKDOCS, reason="the extra `site` is not installed")
def test_every_page_of_the_site_fits_on_every_screen(browser, site):
    # 404.html is for servers alone; of the decisions, which are plain text, one stands for all
    pages = [page for page in sorted(site.rglob("*.html")) if page.name != "404.html" and page.parent.name != "adr"]
    pages.append(next(site.glob("adr/0008*.html")))

    found = {page.name: faults(browser, page, widths=(390,)) for page in pages}

    assert len(pages) > 30
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert faults(browser, site / "index.html") == {}


_HINTS = """(() => {
  const beyond = (node) => node.scrollWidth > node.clientWidth + 1;
  const tables = [...document.querySelectorAll('.md-typeset__scrollwrap')].filter(beyond);
  const drawings = [...document.querySelectorAll('.md-typeset p:has(> img[src$=".svg"])')].filter(beyond);
  const shaded = tables.filter((node) => getComputedStyle(node).backgroundAttachment.includes('local'));
  const told = drawings.filter((node) => getComputedStyle(node, '::before').content.includes('scroll'));
  return [tables.length, shaded.length, drawings.length, told.length];
})()"""


@pytest.mark.skipif(not HAS_MKDOCS, reason="the extra `site` is not installed")
@pytest.mark.parametrize("page", ["configuration.html", "concepts/guard_costs.html"])
def test_what_goes_on_beyond_the_edge_of_a_phone_shows_that_it_does(browser, site, page):
    browser.show(site / page, 390)
    tables, shaded, drawings, told = browser.evaluate(_HINTS)

    assert tables == shaded > 0
    assert drawings == told >= (page != "configuration.html")


@pytest.mark.skipif(not HAS_MKDOCS, reason="the extra `site` is not installed")
def test_the_search_works_in_a_folder_without_a_server(browser, site):
    browser.show(site / "index.html", 1280)
    browser.evaluate("document.querySelector('#__search').click()")
    query = "document.querySelector('[data-md-component=search-query]')"
    browser.evaluate(f"{query}.focus(), {query}.value = 'verdict'")

    found = browser.evaluate(
        f"""new Promise(done => {{
          const look = () => {{
            {query}.dispatchEvent(new KeyboardEvent('keyup', {{ bubbles: true }}));
            const items = document.querySelectorAll('.md-search-result__item').length;
            items ? done(items) : setTimeout(look, 100);
          }};
          look();
        }})"""
    )

    assert found >= 5
