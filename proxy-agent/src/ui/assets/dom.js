// Makes elements from values. Values from objects are always text: this page never parses HTML.

/** Makes an HTML element; attributes and children without a value are left out. */
export function h(name, attributes, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (isNothing(value)) continue;
    // The page's policy forbids style attributes, but not styles.
    if (name === "style") element.style.cssText = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => !isNothing(child)));
  return element;
}

function isNothing(value) {
  return value === undefined || value === null || value === false;
}

/** Changes the children of `parent` to `wanted` in place, so that focus, selection and typed text stay. */
export function show(parent, ...wanted) {
  morphChildren(parent, h("div", {}, wanted));
}

function morph(now, want) {
  if (now.nodeType === Node.TEXT_NODE) {
    if (now.data !== want.data) now.data = want.data;
    return;
  }
  for (const { name } of [...now.attributes]) {
    // The reader decides whether a fold is open.
    if (name !== "open" && !want.hasAttribute(name)) now.removeAttribute(name);
  }
  for (const { name, value } of want.attributes) {
    if (name === "style") now.style.cssText = value;
    else if (now.getAttribute(name) !== value) now.setAttribute(name, value);
  }
  morphChildren(now, want);
}

function morphChildren(now, want) {
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

function keyOf(node) {
  return node.dataset?.key;
}
