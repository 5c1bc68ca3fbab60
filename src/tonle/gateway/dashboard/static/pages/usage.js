// The page "Usage".

import { html } from "../html.js";
import { PageHeading } from "../widgets.js";

export const title = "Usage";

export default function UsagePage() {
  return html`<${PageHeading} title=${title} />`;
}
