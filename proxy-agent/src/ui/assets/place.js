// The address behind the `#`: what is shown, and the reader's choices. Reload, Back and a copied link keep them.

/** Tells whether this is the page of a whole cluster, rather than of one node. */
export const IS_CLUSTER = document.documentElement.dataset.of === "cluster";

export const VIEWS = IS_CLUSTER
  ? [
      ["services", "Services"],
      ["nodes", "Nodes"],
      ["live", "Live"],
      ["map", "Map"],
      ["trace", "Trace"],
      ["drops", "Unserved"],
    ]
  : [
      ["services", "Services"],
      ["live", "Live"],
      ["map", "Map"],
      ["trace", "Trace"],
      ["drops", "Unserved"],
      ["devices", "Devices"],
      ["node", "Node"],
    ];

/** Tells whether the page has a view: links lead to no other. */
export function hasView(view) {
  return VIEWS.some(([id]) => id === view);
}

/** The choices that all views share, with the values that need not be in the address. */
const DEFAULTS = { namespace: "", filter: "", only: "", sort: "-problem", range: "15" };

/** The minutes that a chart may show. */
export const RANGES = ["1", "5", "15"];

/** The reason `spoofed` in links of the previous release, which called it `forged`. */
const OLD_REASON = /(^drops\/|[?&]reason=)forged(?=[?&]|$)/;

/** The address as last parsed: each row has a link, and asks for it. */
let last = { hash: null };

/** Parses the address: `#/services/shop/web?range=5` → view `services`, key `shop/web`, and the parameters. */
export function place() {
  const { hash } = location;
  if (last.hash !== hash) last = { hash, ...parsed(hash) };
  return last;
}

function parsed(hash) {
  const [path, query = ""] = cut(hash.replace(/^#\/?/, "").replace(OLD_REASON, "$1spoofed"), "?");
  const [view, ...rest] = path.split("/").map(decoded);
  return { view: hasView(view) ? view : "services", key: rest.join("/"), params: new URLSearchParams(query) };
}

/** Returns the value of a choice, or of a parameter of the view. */
export function chosen(name) {
  const value = place().params.get(name) ?? DEFAULTS[name] ?? "";
  return name === "range" && !RANGES.includes(value) ? DEFAULTS.range : value;
}

/** Returns the address of a view. It keeps the shared choices, and adds `more`. */
export function hrefOf(view, key = "", more = null) {
  const shared = () => Object.keys(DEFAULTS).map((name) => [name, chosen(name)]);
  if (more) return path(view, key) + query([...shared().filter(([name]) => !(name in more)), ...Object.entries(more)]);
  const now = place();
  now.shared ??= query(shared());
  return path(view, key) + now.shared;
}

/** Changes parameters of the current address, without a step for Back: the reader is still at the same place. */
export function choose(changes) {
  const { view, key, params } = place();
  const kept = [...params].filter(([name]) => !(name in changes));
  history.replaceState(history.state, "", path(view, key) + query([...kept, ...Object.entries(changes)]));
}

/** Returns the parameter for a protocol; TCP need not be said. */
export function protocolOf(protocol = "TCP") {
  return protocol === "TCP" ? "" : protocol.toLowerCase();
}

function path(view, key) {
  return `#/${view}${key ? `/${key.split("/").map(encodeURIComponent).join("/")}` : ""}`;
}

function query(params) {
  const set = params.filter(([name, value]) => value !== "" && value !== DEFAULTS[name]);
  return set.length > 0 ? `?${new URLSearchParams(set)}` : "";
}

function cut(text, at) {
  const index = text.indexOf(at);
  return index < 0 ? [text] : [text.slice(0, index), text.slice(index + 1)];
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // The user typed an invalid address.
  }
}
