// Rendering of components: `render(element, container)` draws an element, and redraws a component when its state changes.
// A component is a function of its properties that returns elements. Its hooks (`useState`, `useRef`, `useMemo`,
// `useEffect`) keep their values between calls, identified by the order of calls.
//
// Redrawing changes only what differs. Children are matched by `key`, or otherwise by their position among their
// siblings; a child of another type is replaced. Texts become text nodes and properties become attributes, never markup.

const LISTENERS = Symbol("listeners");
// Properties that the user changes as well; set after the children, because a select depends on its options.
const CONTROLLED = ["value", "checked"];

const waiting = new Set();
let current = null;
let effects = [];

// Returns an element as a value: its type is a tag name or a component. `render` can draw it any number of times.
export function element(type, properties, ...children) {
  const { key, ref, ...props } = properties ?? {};
  return { type, key, ref, props: { ...props, children } };
}

export function render(root, container) {
  container.replaceChildren();
  const host = { vnode: { type: "host" }, node: container, children: new Map(), depth: 0 };
  update(host, [root]);
  place(host);
  runEffects();
}

// --- hooks

export function useState(initial) {
  const owner = current;
  const state = kept(() => {
    const made = { value: typeof initial === "function" ? initial() : initial };
    made.set = (next) => {
      const value = typeof next === "function" ? next(made.value) : next;
      if (Object.is(value, made.value)) return;
      made.value = value;
      drawSoon(owner);
    };
    return made;
  });
  return [state.value, state.set];
}

export function useRef(initial) {
  return kept(() => ({ current: initial }));
}

export function useMemo(make, inputs) {
  const memo = kept(() => ({}));
  if (differ(memo.inputs, inputs)) Object.assign(memo, { value: make(), inputs });
  return memo.value;
}

// Runs `start` after drawing, and again when an input differs; the returned function cleans up.
export function useEffect(start, inputs) {
  const owner = current;
  const effect = kept(() => ({ owner }));
  if (differ(effect.inputs, inputs)) {
    Object.assign(effect, { start, inputs });
    effects.push(effect);
  }
}

function kept(make) {
  if (current.used === current.hooks.length) current.hooks.push(make());
  current.used += 1;
  return current.hooks[current.used - 1];
}

function differ(before, after) {
  return !before || !after || before.length !== after.length || before.some((each, at) => !Object.is(each, after[at]));
}

function runEffects() {
  const due = effects;
  effects = [];
  for (const effect of due) {
    if (effect.owner.gone) continue;
    effect.end?.();
    effect.end = effect.start();
  }
}

// --- drawing again

function drawSoon(component) {
  if (!waiting.size) queueMicrotask(drawWaiting);
  waiting.add(component);
}

// Parents first, so that their children are not drawn twice.
function drawWaiting() {
  const due = [...waiting].sort((a, b) => a.depth - b.depth);
  for (const component of due) {
    if (!waiting.delete(component) || component.gone) continue;
    call(component);
    let host = component.parent;
    while (!host.node) host = host.parent;
    place(host);
  }
  runEffects();
}

function call(component) {
  const { type, props } = component.vnode;
  waiting.delete(component);
  const outer = current;
  current = component;
  component.used = 0;
  try {
    update(component, [type(props)]);
  } finally {
    current = outer;
  }
}

// --- the drawn tree: each part is {vnode, parent, depth, children}; texts and tags also have a `node` of the document

// Draws `vnodes` as the children of `drawn`. A vnode is an element, a text, a list of vnodes, or nothing at all.
function update(drawn, vnodes) {
  const before = drawn.children;
  drawn.children = new Map();
  vnodes.forEach((vnode, at) => {
    if (vnode === null || vnode === undefined || typeof vnode === "boolean") return;
    let identity = vnode.key ?? at;
    while (drawn.children.has(identity)) identity = `${identity}'`; // keep both children of a repeated key
    const old = before.get(identity);
    if (old && typeOf(old.vnode) === typeOf(vnode)) {
      before.delete(identity);
      drawn.children.set(identity, old);
      if (old.vnode !== vnode) redraw(old, vnode);
    } else drawn.children.set(identity, drawnFirst(vnode, drawn));
  });
  for (const old of before.values()) remove(old, true);
}

function typeOf(vnode) {
  if (typeof vnode !== "object") return "text";
  return Array.isArray(vnode) ? "list" : vnode.type;
}

function drawnFirst(vnode, parent) {
  const drawn = { vnode: null, parent, depth: parent.depth + 1, children: new Map(), node: null };
  const type = typeOf(vnode);
  if (type === "text") drawn.node = document.createTextNode(vnode);
  else if (typeof type === "function") drawn.hooks = [];
  else if (type !== "list") drawn.node = document.createElement(type);
  redraw(drawn, vnode);
  if (drawn.node && vnode.ref) vnode.ref.current = drawn.node;
  return drawn;
}

function redraw(drawn, vnode) {
  const before = drawn.vnode;
  drawn.vnode = vnode;
  const type = typeOf(vnode);
  if (type === "text") {
    if (before !== null && before !== vnode) drawn.node.data = vnode;
  } else if (type === "list") update(drawn, vnode);
  else if (typeof type === "function") call(drawn);
  else {
    setProperties(drawn.node, before?.props ?? {}, vnode.props);
    update(drawn, vnode.props.children);
    place(drawn);
    setControlled(drawn.node, before?.props, vnode.props);
  }
}

function setProperties(node, before, after) {
  for (const name of Object.keys(before)) if (!(name in after)) setProperty(node, name, undefined, before[name]);
  for (const [name, value] of Object.entries(after)) {
    if (value !== before[name]) setProperty(node, name, value, before[name]);
  }
}

function setProperty(node, name, value, before) {
  if (name === "children" || (CONTROLLED.includes(name) && node.localName !== "option")) return;
  if (name === "style") {
    for (const each of Object.keys({ ...before, ...value })) node.style[each] = value?.[each] ?? "";
  } else if (name.startsWith("on")) listen(node, name.slice(2).toLowerCase(), value);
  else if (value === undefined || value === null || value === false) node.removeAttribute(name);
  else node.setAttribute(name, value === true ? "" : value);
}

// Text that the user is typing stays until the property changes.
function setControlled(node, before, after) {
  const writing = node.localName === "input" && node === document.activeElement;
  for (const name of CONTROLLED) {
    if (!(name in after) || (writing && before?.[name] === after[name])) continue;
    const wanted = name === "value" ? String(after.value ?? "") : Boolean(after[name]);
    if (node[name] !== wanted) node[name] = wanted;
  }
}

function listen(node, kind, listener) {
  const listeners = (node[LISTENERS] ??= {});
  if (!(kind in listeners)) node.addEventListener(kind, (event) => listeners[kind]?.(event));
  listeners[kind] = listener;
}

// Orders the nodes below `host` like its children, moving only misplaced ones.
function place(host) {
  let next = host.node.firstChild;
  const below = (drawn) => {
    for (const child of drawn.children.values()) {
      if (!child.node) below(child);
      else if (child.node === next) next = next.nextSibling;
      else host.node.insertBefore(child.node, next);
    }
  };
  below(host);
}

function remove(drawn, fromDocument) {
  drawn.gone = true;
  if (fromDocument && drawn.node) drawn.node.remove();
  if (drawn.vnode.ref) drawn.vnode.ref.current = null;
  for (const hook of drawn.hooks ?? []) hook?.end?.();
  for (const child of drawn.children.values()) remove(child, fromDocument && !drawn.node);
}
