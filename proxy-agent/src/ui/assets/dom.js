// Makes elements from values. Values from objects are always text: this page never parses HTML.

/** Makes an HTML element; attributes and children without a value are left out. */
export function h(name, attributes, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(element, attributes, children) {
  for (const name in attributes) {
    const value = attributes[name];
    if (isNothing(value)) continue;
    // The page's policy forbids style attributes, but not styles.
    if (name === "style") element.style.cssText = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  add(element, children);
  return element;
}

function add(element, children) {
  for (const child of children) {
    if (Array.isArray(child)) add(element, child);
    else if (!isNothing(child)) element.append(child);
  }
}

function isNothing(value) {
  return value === undefined || value === null || value === false;
}

/** What `late` elements show, by element. */
const lates = new WeakMap();
/** The elements of `lates` that are still bare. */
let empty = [];

/** Makes an element with a child for each content. `show` calls `child(n)` only where the page does not show content `n` there already. */
export function late(name, attributes, contents, child) {
  const element = document.createElement(name);
  if (attributes["data-key"]) element.dataset.key = attributes["data-key"];
  lates.set(element, { attributes, contents, child });
  empty.push(element);
  return element;
}

/** Changes the children of `parent` to `wanted` in place, so that focus, selection and typed text stay. */
export function show(parent, ...wanted) {
  morphChildren(parent, h("div", {}, wanted));
  for (const element of empty) if (element.isConnected) fill(element, lates.get(element).attributes, childrenOf(lates.get(element)));
  empty = [];
}

function childrenOf({ contents, child }) {
  return contents.map((_, n) => child(n));
}

function morph(now, want) {
  if (now.nodeType === Node.TEXT_NODE) {
    if (now.data !== want.data) now.data = want.data;
    return;
  }
  const [before, late] = [lates.get(now), lates.get(want)];
  if (late && before) return morphLate(now, before, late);
  if (late) fill(want, late.attributes, childrenOf(late));
  if (late || before) lates.set(now, late);
  for (const name of now.getAttributeNames()) {
    // The reader decides whether a fold is open.
    if (name !== "open" && !want.hasAttribute(name)) now.removeAttribute(name);
  }
  for (const name of want.getAttributeNames()) {
    const value = want.getAttribute(name);
    if (now.getAttribute(name) === value) continue;
    if (name === "style") now.style.cssText = value;
    else now.setAttribute(name, value);
  }
  morphChildren(now, want);
}

function morphLate(now, before, late) {
  const { attributes, contents, child } = late;
  lates.set(now, late);
  for (const name in { ...before.attributes, ...attributes }) {
    const value = attributes[name];
    if (before.attributes[name] === value) continue;
    if (isNothing(value)) now.removeAttribute(name);
    else now.setAttribute(name, value);
  }
  if (before.contents.length !== contents.length) return morphChildren(now, h("div", {}, childrenOf(late)));
  let n = 0;
  for (let one = now.firstChild; one; one = one.nextSibling) {
    if (contents[n] !== before.contents[n]) morph(one, child(n));
    n += 1;
  }
}

function morphChildren(now, want) {
  if (isText(now) && isText(want)) return morph(now.firstChild, want.firstChild);
  const wanted = [...want.childNodes];
  const keys = new Set(wanted.map(keyOf).filter(Boolean));
  const kept = new Map();
  // Obsolete children are removed first. The remaining ones need not move then, and a moved element would lose the
  // focus.
  for (const child of [...now.childNodes]) {
    const key = keyOf(child);
    if (key && !keys.has(key)) child.remove();
    else if (key) kept.set(key, child);
  }
  let next = now.firstChild;
  for (const child of wanted) {
    const key = keyOf(child);
    const same = key ? kept.get(key) : next;
    if (same && same.nodeName === child.nodeName && (key || !keyOf(same))) {
      if (same === next) next = next.nextSibling;
      else now.insertBefore(same, next);
      morph(same, child);
    } else if (!key && next && !keyOf(next)) {
      const old = next;
      next = next.nextSibling;
      old.replaceWith(child);
    } else {
      now.insertBefore(child, next);
    }
  }
  while (next) {
    const old = next;
    next = next.nextSibling;
    old.remove();
  }
}

/** Tells whether an element has a text and no more, as most cells have. */
function isText({ firstChild }) {
  return firstChild?.nodeType === Node.TEXT_NODE && !firstChild.nextSibling;
}

function keyOf(node) {
  return node.dataset?.key;
}
