// Which of the alerts that fire stand at the top of the overview.

const MOST_SHOWN = 10;

// Missed targets stand in their own card. Of backends there may be many: what is about the server itself comes first, then the
// newest. `numMore`: how many are left out.
export function onTop(firing) {
  const rank = (alert) => Number(alert.kind === "backend");
  const alerts = (firing ?? []).filter((alert) => alert.kind !== "sla").sort((a, b) => rank(a) - rank(b) || b.time - a.time);
  return { shown: alerts.slice(0, MOST_SHOWN), numMore: Math.max(0, alerts.length - MOST_SHOWN) };
}
