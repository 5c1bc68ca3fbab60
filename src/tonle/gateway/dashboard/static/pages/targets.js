// Whether latency targets are met, in words.

// Now, and not only until a moment ago: a missed target must hold for a minute before it counts as met.
export const isMissed = ({ meets, burn_rate }) => !meets && burn_rate > 1;

// [kind, words] of a badge. A few slow requests do not make a target missed, but it would be odd to call it met. One that holds
// again is met only after a minute, but it would be odd to call it missed.
export function verdictOf({ meets, targets }) {
  if (!meets) return targets.some(isMissed) ? ["bad", "Target missed"] : ["warning", "Target was missed until now"];
  const known = targets.filter((target) => target.value_s !== null);
  if (known.length === 0) return ["info", "No requests yet"];
  return known.some((target) => target.value_s > target.target_s) ? ["warning", "Too few requests to judge"] : ["good", "Targets met"];
}
