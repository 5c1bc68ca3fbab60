// The page "Backends".

import { html } from "../html.js";
import { PageHeading } from "../widgets.js";

export const title = "Backends";

export default function BackendsPage() {
  return html`<${PageHeading} title=${title} />`;
}
