// What every component needs: Preact, its hooks, and html`…`, which makes elements from a template without a build step.
//
//   import { html, useState } from "./html.js";
//   const Greeting = ({ name }) => html`<p class="note">Hello ${name}</p>`;

import { Component, createContext, Fragment, h, render } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export { Component, createContext, Fragment, h, render };
export {
  useCallback, useContext, useEffect, useErrorBoundary, useId, useLayoutEffect, useMemo, useRef, useState,
} from "./vendor/preact-hooks.js";

export const html = htm.bind(h);
