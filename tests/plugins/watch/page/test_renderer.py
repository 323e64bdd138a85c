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


#: JavaScript that draws something with the renderer, and what it returns.
DRAWN = {
    "a template is drawn, and its values are no markup": (
        """
      const rest = { id: "x", hidden: true };
      render(html`<p class=${"a b"} title='t' ...${rest} lang=${undefined}>one ${2} <b>three</b>
        four${null}${false}${"<i>"}</p>`, place);
      return place.innerHTML;
    """,
        '<p class="a b" title="t" id="x" hidden="">one 2 <b>three</b>four&lt;i&gt;</p>',
    ),
    "elements with a key keep their nodes and state": (
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
        ["firstcbdlast", True],
    ),
    "effects run when their inputs change, and are cleaned up": (
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
        ["on a", "off a", "on b", "off b"],
    ),
    "several state changes cause one redraw": (
        """
      let times = 0, set;
      function Count() { const [n, setN] = useState(0); set = setN; times += 1; return html`<p>${n}</p>`; }
      render(html`<${Count} />`, place);
      set((n) => n + 1); set((n) => n + 1);
      await settled();
      return [place.textContent, times];
    """,
        ["2", 2],
    ),
    "a redraw keeps what a user typed and updates a select": (
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
        ["half a wo", "b"],
    ),
}


@pytest.mark.parametrize(("body", "drawn"), DRAWN.values(), ids=DRAWN)
def test_renderer_of_the_live_page_draws_and_redraws_as_described(page, body, drawn):
    assert page.evaluate(SETUP, body) == drawn
