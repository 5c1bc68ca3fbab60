// The page "Playground".

import { html } from "../html.js";
import { PageHeading } from "../widgets.js";

export const title = "Playground";

export default function PlaygroundPage() {
  return html`<${PageHeading} title=${title} />`;
}
