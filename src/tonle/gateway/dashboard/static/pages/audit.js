// The page "Audit".

import { html } from "../html.js";
import { PageHeading } from "../widgets.js";

export const title = "Audit";

export default function AuditPage() {
  return html`<${PageHeading} title=${title} />`;
}
