"""The live page's own JavaScript renderer and templates, tested in a real browser."""

import pytest

from tests.plugins.watch.page.browser import MISSING, a_browser, opened
from tests.plugins.watch.run_files import served_page

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

#: JavaScript that runs `body` with the renderer's functions and an empty element `place`; `settled()` waits until
#: state changes are drawn.
SETUP = """async (body) => {
  const view = await import("/static/view.js");
  const place = document.createElement("div");
  document.body.replaceChildren(place);
  const settled = () => new Promise((done) => setTimeout(done));
  return await new Function("view", "place", "settled",
    `const { html, render, useEffect, useMemo, useRef, useState } = view; return (async () => { ${body} })();`,
  )(view, place, settled);
}"""


@pytest.fixture(scope="module")
def page(finished_run):
    with (
        a_browser() as browser,
        served_page(finished_run) as server,
        opened(browser, server.url, bypass_csp=True) as one,
    ):
        yield one


def run(page, body):
    return page.evaluate(SETUP, body)


def test_html_template_is_rendered_to_elements_texts_and_attributes_and_its_values_are_no_markup(page):
    drawn = run(
        page,
        """
      const rest = { id: "x", hidden: true };
      render(html`<p class=${"a b"} title='t' ...${rest} lang=${undefined}>one ${2} <b>three</b>
        four${null}${false}${"<i>"}</p>`, place);
      return place.innerHTML;
    """,
    )
    assert drawn == '<p class="a b" title="t" id="x" hidden="">one 2 <b>three</b>four&lt;i&gt;</p>'


def test_elements_with_a_key_keep_their_dom_nodes_and_state_when_they_are_reordered(page):
    drawn = run(
        page,
        """
      let show;
      function Row({ name }) { const [born] = useState(name); return html`<li>${born}</li>`; }
      function List() {
        const [names, setNames] = useState(["a", "b", "c"]);
        show = setNames;
        return html`<ul><li>first</li>${names.map((name) => html`<${Row} key=${name} name=${name} />`)}
          <li>last</li></ul>`;
      }
      render(html`<${List} />`, place);
      const b = place.querySelectorAll("li")[2];
      show(["c", "b", "d"]);
      await settled();
      return [place.textContent, b === place.querySelectorAll("li")[2]];
    """,
    )
    assert drawn == ["firstcbdlast", True]


def test_effects_of_a_component_run_when_their_inputs_change_and_are_cleaned_up(page):
    drawn = run(
        page,
        """
      const seen = [];
      let show;
      function Child({ of }) {
        useEffect(() => { seen.push(`on ${of}`); return () => seen.push(`off ${of}`); }, [of]);
        return html`<p>${of}</p>`;
      }
      function Parent() { const [of, set] = useState("a"); show = set; return of && html`<${Child} of=${of} />`; }
      render(html`<${Parent} />`, place);
      for (const each of ["a", "b", ""]) { show(each); await settled(); }
      return seen;
    """,
    )
    assert drawn == ["on a", "off a", "on b", "off b"]


def test_several_state_changes_in_a_row_cause_one_redraw(page):
    drawn = run(
        page,
        """
      let times = 0, set;
      function Count() { const [n, setN] = useState(0); set = setN; times += 1; return html`<p>${n}</p>`; }
      render(html`<${Count} />`, place);
      set((n) => n + 1); set((n) => n + 1);
      await settled();
      return [place.textContent, times];
    """,
    )
    assert drawn == ["2", 2]


def test_redraw_keeps_the_text_that_a_user_typed_and_updates_a_select_element_to_its_new_value(page):
    drawn = run(
        page,
        """
      let again;
      function Form() {
        const [n, setN] = useState(0);
        again = setN;
        return html`<input value="kept" /><select value=${n ? "b" : "a"}><option value="a">a</option>
          <option value="b">b</option></select>`;
      }
      render(html`<${Form} />`, place);
      const [input, select] = place.children;
      input.focus();
      input.value = "half a wo";
      again(1);
      await settled();
      return [input.value, select.value];
    """,
    )
    assert drawn == ["half a wo", "b"]
