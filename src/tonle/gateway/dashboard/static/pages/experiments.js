// The page "Experiments".

import { html } from "../html.js";
import { PageHeading } from "../widgets.js";

export const title = "Experiments";

export default function ExperimentsPage() {
  return html`<${PageHeading} title=${title} />`;
}
