// Figures over time for charts: of the last five minutes from the stream, of longer ranges from the server's history.

import { html, useMemo } from "./html.js";
import { LIVE_SECONDS, live, useLive } from "./live.js";
import { go } from "./router.js";
import { lastKnown } from "./scale.js";
import { useGet } from "./widgets.js";

export const RANGES = [
  { seconds: LIVE_SECONDS, title: "5 min", words: "the last 5 minutes" },
  { seconds: 3600, title: "1 h", words: "the last hour" },
  { seconds: 86400, title: "1 day", words: "the last day" },
  { seconds: 2592000, title: "30 days", words: "the last 30 days" },
];
const REFRESH_S = { 3600: 5, 86400: 60, 2592000: 300 };
const NOTHING = { t: [], series: {} };

// {t, span, line, isKnown, error}. `line(name, label)` is one series of a Chart, `isKnown(name)` whether it has any figure.
export function useSeries(range) {
  const { version } = useLive();
  const isLive = range === LIVE_SECONDS;
  const kept = useGet(isLive ? null : "/dashboard/api/history", { range }, isLive ? null : REFRESH_S[range]);
  const current = useMemo(() => (isLive ? live.ring.columns() : null), [isLive, version]);
  const { t, series } = current ?? (kept.isLoading && !kept.data ? NOTHING : (kept.data ?? NOTHING));
  const line = (name, label = name) => ({ name, label, values: series[name] ?? t.map(() => null) });
  const isKnown = (name) => (series[name] ?? []).some((value) => value !== null);
  return { t, span: range, line, isKnown, error: isLive ? null : kept.error };
}

// The newest figure of the last minute, whatever range is shown.
export const newest = (name) => lastKnown(live.ring.tail(name, 60), 60);

// The mean of the last ten seconds: what a rate is now.
export function recently(name) {
  const values = live.ring.tail(name, 10).filter((value) => value !== null);
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

// The range in the address: #/overview?range=3600.
export function rangeOf(params) {
  const asked = Number(params.get("range"));
  return RANGES.some((range) => range.seconds === asked) ? asked : LIVE_SECONDS;
}

export function RangeChoice({ page, range }) {
  return html`
    <div class="choices" role="group" aria-label="Time range" data-testid="range">
      ${RANGES.map(({ seconds, title, words }) => html`
        <button key=${seconds} type="button" aria-pressed=${seconds === range} title=${`Show ${words}`} data-testid=${`range-${seconds}`}
          onClick=${() => go(`#/${page}?range=${seconds}`, { replace: true })}>${title}</button>`)}
    </div>`;
}
