// The page "Models".

import { html } from "../html.js";
import { PageHeading } from "../widgets.js";

export const title = "Models";

export default function ModelsPage() {
  return html`<${PageHeading} title=${title} />`;
}
