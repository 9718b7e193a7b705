"use strict";
/* Numbers -> the few points that a screen can show. A pyramid holds the smallest and the largest of 8, 16, 32... points,
   so that a million are drawn as quickly as a thousand, and a spike of one step is never lost. */
const Series = (() => {
  const FIRST = 8;

  function make(x, y) {
    const series = { x: Float64Array.from(x), y: Float64Array.from(y), levels: [] };
    if (x.length > 4 * FIRST) raise(series);
    return series;
  }

  function findExtremes(y, from, to) {
    let least = from, most = from;
    for (let i = from + 1; i < to; i++) {
      if (y[i] < y[least]) least = i;
      if (y[i] > y[most]) most = i;
    }
    return [least, most];
  }

  function raise(series) {
    const { y, levels } = series;
    let size = FIRST, count = Math.ceil(y.length / size);
    let low = new Int32Array(count), high = new Int32Array(count);
    for (let block = 0; block < count; block++) {
      [low[block], high[block]] = findExtremes(y, block * size, Math.min(y.length, (block + 1) * size));
    }
    levels.push({ size, low, high });
    while (count > 64) {
      const before = { low, high };
      const num = count;
      size *= 2; count = Math.ceil(count / 2);
      low = new Int32Array(count); high = new Int32Array(count);
      for (let block = 0; block < count; block++) {
        const one = 2 * block, two = Math.min(num - 1, one + 1);
        low[block] = y[before.low[two]] < y[before.low[one]] ? before.low[two] : before.low[one];
        high[block] = y[before.high[two]] > y[before.high[one]] ? before.high[two] : before.high[one];
      }
      levels.push({ size, low, high });
    }
  }

  function firstAtLeast(values, value) {
    let from = 0, to = values.length;
    while (from < to) {
      const middle = (from + to) >> 1;
      if (values[middle] < value) from = middle + 1; else to = middle;
    }
    return from;
  }

  /* Indices to draw between two places, about `columns` times four at most, with one beyond each end. */
  function pick(series, from, to, columns) {
    const { x, levels } = series;
    const start = Math.max(0, firstAtLeast(x, from) - 1), end = Math.min(x.length, firstAtLeast(x, to) + 1);
    const level = levels.filter((one) => one.size <= (end - start) / columns).pop();
    const picked = [];
    if (!level) {
      for (let i = start; i < end; i++) picked.push(i);
      return picked;
    }
    const add = (...places) => {
      for (const at of places.sort((a, b) => a - b)) if (picked.at(-1) !== at) picked.push(at);
    };
    // The blocks at both ends are only partly shown: what the pyramid knows of them may lie outside
    const first = Math.ceil(start / level.size), last = Math.floor(end / level.size);
    add(start);
    if (start < first * level.size) add(...findExtremes(series.y, start, first * level.size));
    for (let block = first; block < last; block++) add(level.low[block], level.high[block]);
    if (last * level.size < end) add(...findExtremes(series.y, last * level.size, end));
    add(end - 1);
    return picked;
  }

  const nearest = (series, x) => {
    const after = Math.min(series.x.length - 1, firstAtLeast(series.x, x));
    const before = Math.max(0, after - 1);
    return x - series.x[before] < series.x[after] - x ? before : after;
  };

  /* A running mean whose weights fall by `weight` from point to point; the first points are not pulled towards zero. */
  function smooth(y, weight) {
    let sum = 0, total = 0;
    return Float64Array.from(y, (value) => {
      sum = weight * sum + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return sum / total;
    });
  }

  /* Seconds at a step, between the steps whose time is known. */
  function timeAt(clock, step) {
    const { x, y } = clock;
    if (!x.length) return step;
    const after = firstAtLeast(x, step);
    if (after === 0) return y[0];
    if (after >= x.length) return y[x.length - 1];
    return y[after - 1] + ((y[after] - y[after - 1]) * (step - x[after - 1])) / (x[after] - x[after - 1]);
  }

  return { make, pick, nearest, smooth, timeAt };
})();
