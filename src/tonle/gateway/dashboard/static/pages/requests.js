// The page "Requests".

import { html } from "../html.js";
import { PageHeading } from "../widgets.js";

export const title = "Requests";

export default function RequestsPage() {
  return html`<${PageHeading} title=${title} />`;
}
