// Template parser: html`<p class=${look}>${text}</p>` returns the described element. Each template is parsed
// once; every call fills the resulting plan with its values.
//
// The language has elements; attributes whose value is a quoted literal or one `${value}`; `...${properties}`; components
// as `<${Component} …>`; and `/>` for elements without content. White space that contains a line break is dropped at both
// ends of a text.

const HOLE = "\0";
const NAME = /[^\s/>=\0]+/y;
const LITERAL = /"([^"\0]*)"|'([^'\0]*)'/y;
const SPACE = /\s*/y;
const TEXT = /[^<\0]+/y;
const CLOSING = /<\/[^>]*>/y;

const plans = new WeakMap();

// Returns a template function that creates elements with `element(type, properties, ...children)`.
export function templates(element) {
  return (strings, ...values) => {
    if (!plans.has(strings)) plans.set(strings, parsed(strings.join(HOLE)));
    const made = plans.get(strings).map((part) => filled(part, values, element));
    return made.length > 1 ? made : made[0];
  };
}

// A part of a plan is a text, a hole {hole}, or an element {type, properties, children} whose type may be a hole.
function filled(part, values, element) {
  if (typeof part === "string") return part;
  if ("hole" in part) return values[part.hole];
  const properties = {};
  for (const { name, value } of part.properties) {
    if (name === "...") Object.assign(properties, values[value.hole]);
    else properties[name] = typeof value === "object" ? values[value.hole] : value;
  }
  const type = typeof part.type === "object" ? values[part.type.hole] : part.type;
  return element(type, properties, ...part.children.map((child) => filled(child, values, element)));
}

function parsed(source) {
  let at = 0;
  let holes = 0;

  const take = (pattern) => {
    pattern.lastIndex = at;
    const found = pattern.exec(source);
    if (found) at = pattern.lastIndex;
    return found;
  };
  const takeExactly = (text) => {
    if (!source.startsWith(text, at)) return false;
    at += text.length;
    return true;
  };
  const takeHole = () => (takeExactly(HOLE) ? { hole: holes++ } : null);
  const fail = () => {
    throw new SyntaxError(`cannot parse the template from here on: ${source.slice(at, at + 60).replaceAll(HOLE, "${}")}`);
  };

  function content() {
    const parts = [];
    while (at < source.length && !source.startsWith("</", at)) {
      const hole = takeHole();
      if (hole) parts.push(hole);
      else if (source[at] === "<") parts.push(elementPart());
      else {
        const text = take(TEXT)[0].replace(/^\s*\n\s*|\s*\n\s*$/g, "");
        if (text) parts.push(text);
      }
    }
    return parts;
  }

  function elementPart() {
    at += 1;
    const type = takeHole() ?? take(NAME)?.[0] ?? fail();
    const properties = [];
    for (take(SPACE); !takeExactly(">"); take(SPACE)) {
      if (takeExactly("/>")) return { type, properties, children: [] };
      properties.push(property());
    }
    const children = content();
    if (!take(CLOSING)) fail();
    return { type, properties, children };
  }

  function property() {
    const name = take(NAME)?.[0] ?? fail();
    if (name === "...") return { name, value: takeHole() ?? fail() };
    if (!takeExactly("=")) return { name, value: true };
    const literal = take(LITERAL);
    return { name, value: literal ? (literal[1] ?? literal[2]) : (takeHole() ?? fail()) };
  }

  const plan = content();
  if (at < source.length) fail();
  return plan;
}
