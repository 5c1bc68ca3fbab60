// The frame of the dashboard: who is signed in, which page is shown, whether the server can be reached.

import { get, onLoggedOut, post } from "./api.js";
import { html, render, useCallback, useEffect, useErrorBoundary, useRef, useState } from "./html.js";
import { live, useLive } from "./live.js";
import { Login } from "./login.js";
import { go, useRoute } from "./router.js";
import { chooseTheme, chosenTheme, nextTheme } from "./theme.js";
import { inWords, Message } from "./widgets.js";

import * as audit from "./pages/audit.js";
import * as backends from "./pages/backends.js";
import * as experiments from "./pages/experiments.js";
import * as keys from "./pages/keys.js";
import * as models from "./pages/models.js";
import * as overview from "./pages/overview.js";
import * as playground from "./pages/playground.js";
import * as requests from "./pages/requests.js";
import * as usage from "./pages/usage.js";
import * as voice from "./pages/voice.js";

// A page exports `title` and, as default, a component that takes {session, rest, params}: `session` as the server tells it,
// `rest` and `params` from the address (router.js). Only the page that is shown exists.
const PAGES = { overview, requests, backends, models, keys, usage, experiments, audit, playground, voice };

function App() {
  const [session, setSession] = useState(null);
  const [error, setError] = useState(null);
  const isLeaving = useRef(false); // signing out by hand: not to be told of
  const load = useCallback(async () => {
    setError(null);
    try {
      setSession(await get("/dashboard/api/session"));
    } catch (problem) {
      setError(inWords(problem));
    }
  }, []);
  // A session that was open is open no more: the server says why.
  const lose = useCallback(async () => {
    await load();
    setSession((now) => (now?.needs_login && !isLeaving.current ? { ended: "elsewhere", ...now } : now));
  }, []);
  const begin = useCallback(() => {
    isLeaving.current = false;
    return load();
  }, []);
  const leave = useCallback(() => {
    isLeaving.current = true;
    live.stop();
  }, []);
  useEffect(() => {
    load();
    return onLoggedOut(lose);
  }, []);

  if (error) {
    return html`<main class="alone"><${Message} kind="bad">${error}<//><button type="button" onClick=${load}>Try again</button></main>`;
  }
  if (!session) return html`<main class="alone" aria-busy="true"><p>Loading…</p></main>`;
  if (session.needs_login) return html`<${Login} ended=${session.ended} onDone=${begin} />`;
  return html`<${Frame} session=${session} onLost=${lose} onLeave=${leave} onLeft=${load} />`;
}

function Frame({ session, onLost, onLeave, onLeft }) {
  const route = useRoute();
  const page = PAGES[route.name] ?? null;
  const main = useRef(null);
  const isFirst = useRef(true);
  useEffect(() => {
    live.start(onLost);
    return () => live.stop();
  }, []);
  useEffect(() => {
    document.title = `${page?.title ?? "Not found"} · Tonle`;
    if (!isFirst.current) main.current.focus();
    isFirst.current = false;
    window.scrollTo(0, 0);
  }, [route.name]);

  const skip = (event) => {
    event.preventDefault(); // the address after "#" is the page
    main.current.focus();
  };
  return html`
    <a class="skip" href="#content" onClick=${skip}>Skip to the page</a>
    <div class="frame">
      <${Sidebar} session=${session} current=${route.name} onLeave=${onLeave} onLeft=${onLeft} />
      <main id="content" tabindex="-1" ref=${main} data-testid=${`page-${route.name}`}>
        <${ConnectionBanner} />
        ${page
          ? html`<${SafePage} key=${route.name} page=${page} session=${session} rest=${route.rest} params=${route.params} />`
          : html`<h1>Not found</h1><p>There is no page “${route.name}”. <a href="#/overview">Go to the overview.</a></p>`}
      </main>
    </div>`;
}

// A mistake in one page leaves the others usable.
function SafePage({ page, ...props }) {
  const [error, reset] = useErrorBoundary((problem) => console.error(problem));
  if (error) {
    return html`<${Message} kind="bad">This page failed: ${error.message}<//><button type="button" onClick=${reset}>Show it again</button>`;
  }
  return html`<${page.default} ...${props} />`;
}

function Sidebar({ session, current, onLeave, onLeft }) {
  const [isOpen, setOpen] = useState(false);
  useEffect(() => setOpen(false), [current]);
  const { server, key } = session;
  return html`
    <header class="sidebar">
      <div class="brand">
        <a href="#/overview"><img src="/dashboard/static/icon.svg" alt="" width="24" height="24" /> Tonle</a>
        <${Connection} />
        <button type="button" class="menu" aria-expanded=${isOpen} aria-controls="menu" data-testid="menu" onClick=${() => setOpen(!isOpen)}>Menu</button>
      </div>
      <div id="menu" class=${isOpen ? "opened" : ""}>
        <nav aria-label="Pages">
          <ul>
            ${Object.entries(PAGES).map(([name, page]) => html`
              <li key=${name}><a href=${`#/${name}`} aria-current=${name === current ? "page" : null} data-testid=${`nav-${name}`}>${page.title}</a></li>`)}
          </ul>
        </nav>
        <div class="sidebar-foot">
          <p>${server.name}<br /><span class="soft">tonle ${server.kind} ${server.version}</span></p>
          ${key && html`<p class="soft">Key: ${key.name || key.id}${session.can_admin ? "" : ", read-only"}</p>`}
          <${ThemeButton} />
          ${key && html`<${LogoutButton} onLeave=${onLeave} onLeft=${onLeft} />`}
        </div>
      </div>
    </header>`;
}

function ThemeButton() {
  const [choice, setChoice] = useState(chosenTheme());
  const change = () => {
    const next = nextTheme(choice);
    chooseTheme(next);
    setChoice(next);
  };
  return html`<button type="button" data-testid="theme" onClick=${change}>Theme: ${choice}</button>`;
}

function LogoutButton({ onLeave, onLeft }) {
  const logout = async () => {
    onLeave();
    try {
      await post("/dashboard/api/logout");
    } finally {
      go("#/overview");
      onLeft();
    }
  };
  return html`<button type="button" data-testid="logout" onClick=${logout}>Sign out</button>`;
}

const STATES = { connecting: "Connecting", open: "Live", lost: "Not connected" };

function Connection() {
  const { state } = useLive();
  return html`<span class=${`connection ${state}`} data-testid="connection">${STATES[state]}</span>`;
}

function ConnectionBanner() {
  const { state, retryAt } = useLive();
  const wait = Math.max(0, Math.ceil((retryAt ?? 0) - Date.now() / 1000));
  return html`
    <div role="status" data-testid="banner">
      ${state === "lost" && html`
        <p class="message bad">The connection to the server is lost; figures below are the last ones known.
          <span aria-hidden="true"> ${wait ? `Next attempt in ${wait} s.` : "Connecting…"}</span></p>`}
    </div>`;
}

render(html`<${App} />`, document.getElementById("app"));
