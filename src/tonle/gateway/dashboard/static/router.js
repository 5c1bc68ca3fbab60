// Which page is shown, from the part of the address after "#": #/requests/ID?status=failed.

import { useEffect, useState } from "./html.js";

// {name: "requests", rest: ["ID"], params: URLSearchParams}
export function parseHash(hash) {
  const [path, query = ""] = hash.replace(/^#?\/?/, "").split("?");
  const [name, ...rest] = path.split("/").map(decode);
  return { name: name || "overview", rest: rest.filter(Boolean), params: new URLSearchParams(query) };
}

export function useRoute() {
  const [route, setRoute] = useState(() => parseHash(location.hash));
  useEffect(() => {
    const change = () => setRoute(parseHash(location.hash));
    addEventListener("hashchange", change);
    return () => removeEventListener("hashchange", change);
  }, []);
  return route;
}

// go("#/requests/ID"): as if a link had been followed. `replace`: without an entry in the browser's history.
export function go(hash, { replace = false } = {}) {
  if (!replace) location.hash = hash;
  else {
    history.replaceState(null, "", hash);
    dispatchEvent(new HashChangeEvent("hashchange"));
  }
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
