// The page "Keys".

import { html } from "../html.js";
import { PageHeading } from "../widgets.js";

export const title = "Keys";

export default function KeysPage() {
  return html`<${PageHeading} title=${title} />`;
}
