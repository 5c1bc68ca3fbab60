// Requests to the server. Each returns the parsed JSON, or throws an ApiError whose message can be shown as it is.
// The stream of live figures is in live.js.

const loggedOutListeners = new Set();

export class ApiError extends Error {
  constructor(message, { status = 0, code = null, param = null } = {}) {
    super(message);
    this.name = "ApiError";
    this.status = status; // 0: the server could not be reached
    this.code = code;
    this.param = param; // the field of the request that is wrong
  }
}

// get("/dashboard/api/requests", { limit: 100, text: "" }): parameters that are empty, null or undefined are left out.
export const get = async (path, params, options) => body(await send("GET", withParams(path, params), options));
export const post = async (path, json, options) => body(await send("POST", path, { json, ...options }));
export const del = async (path, options) => body(await send("DELETE", path, options));

// The raw Response, for answers that are streamed or not JSON. Throws an ApiError unless the status is 2xx.
// `json` or `form` (a FormData) is the body.
export async function send(method, path, { json, form, signal, headers = {} } = {}) {
  // The header is what a page of another origin cannot send without the server's consent: it makes cookies safe.
  const sent = { "X-Tonle-Dashboard": "1", ...headers };
  if (json !== undefined) sent["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method, signal, headers: sent, credentials: "same-origin", cache: "no-store",
      body: json === undefined ? form : JSON.stringify(json),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it running, and is this machine connected to it?");
  }
  if (!response.ok) {
    const refused = await refusal(response);
    if (response.status === 401 && !path.startsWith("/dashboard/api/login")) for (const tell of loggedOutListeners) tell();
    throw refused;
  }
  return response;
}

export function withParams(path, params = {}) {
  const given = Object.entries(params ?? {}).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

// Calls `callback` when the server no longer knows this session. Returns the function that ends it.
export function onLoggedOut(callback) {
  loggedOutListeners.add(callback);
  return () => loggedOutListeners.delete(callback);
}

// A few answers are a plain sentence instead of JSON.
async function body(response) {
  if (response.status === 204) return null;
  const isJson = (response.headers.get("Content-Type") ?? "").includes("json");
  return isJson ? response.json() : response.text();
}

// Bodies of errors are OpenAI's: {"error": {"message", "code", "param"}}.
async function refusal(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // not JSON: a proxy's page, or nothing
  }
  const message = error.message ?? `The server answered with status ${response.status} and no explanation.`;
  return new ApiError(sentence(message), { status: response.status, code: error.code ?? null, param: error.param ?? null });
}

// The server's messages are written for logs: begin them with a capital, end them with a full stop.
export function sentence(text) {
  const trimmed = String(text).trim();
  if (!trimmed) return "";
  return trimmed[0].toUpperCase() + trimmed.slice(1) + (/[.!?]$/.test(trimmed) ? "" : ".");
}
