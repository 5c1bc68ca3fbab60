// How a request ended, in a word (the audit's): ok, cached, refused, cancelled, failed, interrupted.

import { html } from "../html.js";
import { Badge } from "../widgets.js";

const KINDS = { ok: "good", cached: "good", refused: "warning", cancelled: "info", failed: "bad", interrupted: "bad" };

export const STATUSES = Object.keys(KINDS);

export const StatusBadge = ({ status }) => html`<${Badge} kind=${KINDS[status] ?? "info"}>${status}<//>`;
