// The page "Overview".

import { html } from "../html.js";
import { PageHeading } from "../widgets.js";

export const title = "Overview";

export default function OverviewPage() {
  return html`<${PageHeading} title=${title} />`;
}
