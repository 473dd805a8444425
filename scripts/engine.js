"use strict";
// The Tiny Recursive Model in plain JavaScript: the forward pass of model.py on one question, with its names
// in its order, and the network of examples/houses.py. scripts/export.py puts this file into a page, where it
// runs in a worker.
//
// A matrix is {rows, columns, data}: data is a Float32Array, row after row. No function changes an argument.
// The letters in shapes are those of model.py; M and N are any numbers of rows.

// ---------------------------------------------------------------------------------------------------------
// The recursion (paper, figure 3)

// Refines the latent z_L L_cycles times, then the answer z_H; x is the embedded question [L, D].
function latent_recursion(net, x, z_H, z_L, L_cycles) {
  // think: the latent sees the question and the answer so far
  for (let i = 0; i < L_cycles; i++) z_L = net(add(z_L, add(z_H, x)));
  // write: the answer sees only the latent
  z_H = net(add(z_H, z_L));
  return {z_H, z_L};
}

// Runs H_cycles latent recursions.
function deep_recursion(net, x, z_H, z_L, H_cycles, L_cycles) {
  for (let i = 0; i < H_cycles; i++) ({z_H, z_L} = latent_recursion(net, x, z_H, z_L, L_cycles));
  return {z_H, z_L};
}

// ---------------------------------------------------------------------------------------------------------
// The supervision step (paper, sections 2 and 4.6)

// The network with its embeddings and heads. settings: of the network, with its sizes; weights: {name: matrix},
// as model.py names them, with one row in the puzzle embedding.
class TRM {
  constructor(settings, weights) {
    this.settings = settings;
    this.weights = weights;
    this.prefix = settings.prefix;
    this.length = this.prefix + settings.seq_len;
    this.L_level = Net(settings, weights, this.length);
  }

  // Returns the state in which a question begins, {z_H, z_L}: [L, D] each.
  first_state() {
    const D = this.settings.hidden_size;
    const all_positions = row => map(matrix(this.length, D), (_, i) => row.data[i % D]);
    return {z_H: all_positions(this.weights.H_init), z_L: all_positions(this.weights.L_init)};
  }

  // Returns the state after one deep recursion on the embedded question x [L, D].
  recursion(x, {z_H, z_L}) {
    const {H_cycles, L_cycles} = this.settings;
    return deep_recursion(this.L_level, x, z_H, z_L, H_cycles, L_cycles);
  }

  // Returns the logits [S, V] and q_halt of a state.
  answer({z_H}) {
    // an answer for each cell of the puzzle; the first position says whether to halt
    const cells = matrix(this.settings.seq_len, z_H.columns, z_H.data.subarray(this.prefix * z_H.columns));
    const logits = product(cells, this.weights["lm_head.weight"]);
    const q_halt = product(z_H, this.weights["q_head.weight"]).data[0] + this.weights["q_head.bias"].data[0];
    return {logits, q_halt};
  }

  // Runs the recursion once; returns {state, answers: the predicted tokens [S], q_halt}.
  supervision_step(state, inputs) {
    state = this.recursion(this.embed(inputs), state);
    const {logits, q_halt} = this.answer(state);
    const answers = rows(logits).map(row => row.indexOf(Math.max(...row)));
    return {state, answers, q_halt};
  }

  // Returns the embedded question x [L, D]; inputs: tokens [S].
  embed(inputs) {
    const {hidden_size, pos_encodings} = this.settings;
    const table = rows(this.weights["embed_tokens.embedding_weight"]);
    let x = matrix(this.length, hidden_size);
    // the row of the puzzle embedding fills the first positions, zeros the others
    if (this.prefix) x.data.set(this.weights["puzzle_emb.weights"].data);
    inputs.forEach((token, i) => x.data.set(table[token], (this.prefix + i) * hidden_size));
    // sqrt(0.5): the sum of two has the deviation of one
    if (pos_encodings === "learned") {
      x = map(add(x, this.weights["embed_pos.embedding_weight"]), value => Math.sqrt(0.5) * value);
    }
    return map(x, value => Math.sqrt(hidden_size) * value);
  }
}

// The network of examples/houses.py: a row of x, z_L and z_H belongs to a digit of a cell, [S * K, D].
// settings: with the seq_len and the vocab_size of the question. units: see UnitBlock.
class UnitTRM extends TRM {
  constructor(settings, weights, units) {
    super({...settings, units, num_digits: settings.vocab_size - 2}, weights);
    this.length = settings.seq_len * this.settings.num_digits;
  }

  embed(inputs) {
    // a digit is impossible, possible or given in a cell
    const digits = Array.from({length: this.settings.num_digits}, (_, i) => 2 + i);
    const state = (token, digit) => token === digit ? 2 : token === 1 ? 1 : 0;
    return super.embed(inputs.flatMap(token => digits.map(digit => state(token, digit))));
  }

  answer({z_H}) {
    const {seq_len, num_digits} = this.settings;
    const scores = rows(matrix(seq_len, num_digits, product(z_H, this.weights["lm_head.weight"]).data));
    // the halting head sees the mean of all, and by how much the least certain cell prefers its digit
    const margins = scores.map(row => [...row].sort((a, b) => b - a)).map(([first, second]) => first - second);
    const [mean] = rows(means(z_H, [[...rows(z_H).keys()]]));
    const seen = matrix(1, mean.length + 1, Float32Array.of(...mean, Math.min(...margins)));
    const q_halt = product(seen, this.weights["q_head.weight"]).data[0] + this.weights["q_head.bias"].data[0];
    // no cell of an answer is padding or empty
    const logits = matrix(seq_len, 2 + num_digits).data.fill(-1e4);
    scores.forEach((row, i) => logits.set(row, i * (2 + num_digits) + 2));
    return {logits: matrix(seq_len, 2 + num_digits, logits), q_halt};
  }
}

// ---------------------------------------------------------------------------------------------------------
// The network

// Root-mean-square norm of each row, without a weight.
function rms_norm(x) {
  return map_rows(x, row => {
    let sum = 0;
    for (const value of row) sum += value * value;
    const scale = 1 / Math.sqrt(sum / row.length + 1e-5);
    return row.map(value => value * scale);
  });
}

// Layer norm of each row, without weights.
function layer_norm(x) {
  const y = matrix(x.rows, x.columns);
  for (let first = 0; first < x.data.length; first += x.columns) {
    let sum = 0, squares = 0;
    for (let i = first; i < first + x.columns; i++) sum += x.data[i];
    const mean = sum / x.columns;
    for (let i = first; i < first + x.columns; i++) squares += (x.data[i] - mean) ** 2;
    const scale = 1 / Math.sqrt(squares / x.columns + 1e-5);
    for (let i = first; i < first + x.columns; i++) y.data[i] = (x.data[i] - mean) * scale;
  }
  return y;
}

// Gated MLP (arXiv 2002.05202) of each row.
function SwiGLU(gate_up_proj, down_proj) {
  return x => {
    const gate_up = product(x, gate_up_proj);  // [M, 2 * hidden]
    const y = matrix(x.rows, down_proj.columns);  // [M, hidden]
    for (let row = 0; row < y.rows; row++) {
      let gate = row * gate_up.columns, up = gate + y.columns;
      for (let i = row * y.columns; i < (row + 1) * y.columns; i++, gate++, up++) {
        const value = gate_up.data[gate];
        y.data[i] = value / (1 + Math.exp(-value)) * gate_up.data[up];
      }
    }
    return product(y, down_proj);
  };
}

// Rotary position embedding (arXiv 2104.09864), halves convention; x, cos, sin: [L, d].
function rotate(x, {cos, sin}) {
  const half = x.columns / 2;
  return map(x, (value, i) => {
    const turned = i % x.columns < half ? -x.data[i + half] : x.data[i - half];
    return value * cos.data[i] + turned * sin.data[i];
  });
}

// Self-attention over all positions.
function Attention(num_heads, qkv_proj, o_proj) {
  return (x, rope) => {
    // queries, keys and values of all heads in one product
    const D = x.columns, d = D / num_heads;
    const qkv = product(x, qkv_proj);
    const out = matrix(x.rows, D);
    for (let head = 0; head < num_heads; head++) {
      let [q, k, v] = [0, D, 2 * D].map(first => columns(qkv, first + head * d, d));  // [L, d] each
      if (rope) [q, k] = [rotate(q, rope), rotate(k, rope)];
      // attend, and join the heads
      const weights = softmax(map(product(q, k), score => score / Math.sqrt(d)));
      const values = product(weights, transposed(v));
      rows(values).forEach((row, i) => out.data.set(row, i * D + head * d));
    }
    return product(out, o_proj);
  };
}

// Mixes positions (by an MLP or by attention), then channels; each is a residual followed by its norm.
function Block(settings, weights, name) {
  const proj = path => weights[`${name}.${path}.weight`];
  const mlp = SwiGLU(proj("mlp.gate_up_proj"), proj("mlp.down_proj"));
  if (settings.units) return UnitBlock(settings, proj, mlp);
  if (settings.mlp_t) {
    const mlp_t = SwiGLU(proj("mlp_t.gate_up_proj"), proj("mlp_t.down_proj"));
    return x => {
      // across positions, which are the columns of the transposed x
      const across = transposed(x);
      x = transposed(rms_norm(add(across, mlp_t(across))));
      return rms_norm(add(x, mlp(x)));
    };
  }
  const self_attn = Attention(settings.num_heads, proj("self_attn.qkv_proj"), proj("self_attn.o_proj"));
  return (x, rope) => {
    x = rms_norm(add(x, self_attn(x, rope)));
    return rms_norm(add(x, mlp(x)));
  };
}

// The block of examples/houses.py. settings.units: {lines, boxes}, lists of units, which are lists of cells;
// proj: a function of a matrix's name.
function UnitBlock({units: {lines, boxes}, seq_len, num_digits}, proj, mlp) {
  // the groups of rows that are a digit's in the cells of a unit, or a cell's
  const digits = Array.from({length: num_digits}, (_, digit) => digit);
  const of_units = units => units.flatMap(cells => digits.map(digit => cells.map(i => i * num_digits + digit)));
  const cells = Array.from({length: seq_len}, (_, i) => digits.map(digit => i * num_digits + digit));
  const messages = [
    [of_units(lines), proj("across_lines")], [of_units(boxes), proj("across_boxes")],
    [cells, proj("across_digits")]];
  return x => {
    // the means of units and of digits, each through its matrix, back to the cells
    let y = x;
    for (const [groups, across] of messages) y = add_to_groups(y, groups, product(means(x, groups), across));
    y = layer_norm(y);
    // across channels
    return layer_norm(add(y, mlp(y)));
  };
}

// The one network of the recursion: a function of x [L, D].
function Net(settings, weights, length) {
  const block = (_, i) => Block(settings, weights, `L_level.layers.${i}`);
  const layers = Array.from({length: settings.L_layers}, block);
  let rope = null;
  if (settings.pos_encodings === "rope") {
    // an angle for each position and channel of a head, its two halves alike
    const d = settings.hidden_size / settings.num_heads;
    const angle = map(matrix(length, d), (_, i) => Math.floor(i / d) * 10000 ** (-2 * (i % (d / 2)) / d));
    rope = {cos: map(angle, Math.cos), sin: map(angle, Math.sin)};
  }
  return x => layers.reduce((y, layer) => layer(y, rope), x);
}

// ---------------------------------------------------------------------------------------------------------
// Matrices

function matrix(rows, columns, data = new Float32Array(rows * columns)) {
  return {rows, columns, data};
}

function map(x, f) {
  return matrix(x.rows, x.columns, x.data.map(f));
}

function map_rows(x, f) {
  const y = matrix(x.rows, x.columns);
  rows(x).forEach((row, i) => y.data.set(f(row), i * x.columns));
  return y;
}

function add(x, y) {
  const sum = matrix(x.rows, x.columns);
  for (let i = 0; i < sum.data.length; i++) sum.data[i] = x.data[i] + y.data[i];
  return sum;
}

// Returns the mean of each group of rows, [groups, columns]; groups: lists of the numbers of rows.
function means(x, groups) {
  const y = matrix(groups.length, x.columns);
  rows(y).forEach((mean, group) => {
    for (const row of groups[group]) {
      for (let i = 0; i < x.columns; i++) mean[i] += x.data[row * x.columns + i] / groups[group].length;
    }
  });
  return y;
}

// Returns x with a row of y [groups, columns] added to all rows of its group.
function add_to_groups(x, groups, y) {
  const sum = matrix(x.rows, x.columns, x.data.slice());
  groups.forEach((group, first) => {
    for (const row of group) {
      for (let i = 0; i < x.columns; i++) sum.data[row * x.columns + i] += y.data[first * x.columns + i];
    }
  });
  return sum;
}

// Returns the rows as arrays of the same memory.
function rows(x) {
  return Array.from({length: x.rows}, (_, i) => x.data.subarray(i * x.columns, (i + 1) * x.columns));
}

function columns(x, first, count) {
  return map(matrix(x.rows, count), (_, i) => x.data[Math.floor(i / count) * x.columns + first + i % count]);
}

function transposed(x) {
  return map(matrix(x.columns, x.rows), (_, i) => x.data[i % x.rows * x.columns + Math.floor(i / x.rows)]);
}

function softmax(x) {
  return map_rows(x, row => {
    const most = Math.max(...row), powers = row.map(score => Math.exp(score - most));
    const sum = powers.reduce((total, power) => total + power);
    return powers.map(power => power / sum);
  });
}

// Returns x [M, K] times the transposed w [N, K]: [M, N]. It takes four rows of each at a time, so that the
// processor loads a number once for four multiplications; the last rows are taken twice if they are fewer.
function product(x, w) {
  const [M, N, K] = [x.rows, w.rows, x.columns], [a, b] = [x.data, w.data];
  const y = matrix(M, N), c = y.data;
  for (let m = 0; m < M; m += 4) {
    const m1 = Math.min(m + 1, M - 1), m2 = Math.min(m + 2, M - 1), m3 = Math.min(m + 3, M - 1);
    const x0 = m * K, x1 = m1 * K, x2 = m2 * K, x3 = m3 * K;
    for (let n = 0; n < N; n += 4) {
      const n1 = Math.min(n + 1, N - 1), n2 = Math.min(n + 2, N - 1), n3 = Math.min(n + 3, N - 1);
      const w0 = n * K, w1 = n1 * K, w2 = n2 * K, w3 = n3 * K;
      let s00 = 0, s01 = 0, s02 = 0, s03 = 0, s10 = 0, s11 = 0, s12 = 0, s13 = 0;
      let s20 = 0, s21 = 0, s22 = 0, s23 = 0, s30 = 0, s31 = 0, s32 = 0, s33 = 0;
      for (let k = 0; k < K; k++) {
        const a0 = a[x0 + k], a1 = a[x1 + k], a2 = a[x2 + k], a3 = a[x3 + k];
        const b0 = b[w0 + k], b1 = b[w1 + k], b2 = b[w2 + k], b3 = b[w3 + k];
        s00 += a0 * b0; s01 += a0 * b1; s02 += a0 * b2; s03 += a0 * b3;
        s10 += a1 * b0; s11 += a1 * b1; s12 += a1 * b2; s13 += a1 * b3;
        s20 += a2 * b0; s21 += a2 * b1; s22 += a2 * b2; s23 += a2 * b3;
        s30 += a3 * b0; s31 += a3 * b1; s32 += a3 * b2; s33 += a3 * b3;
      }
      c[m * N + n] = s00; c[m * N + n1] = s01; c[m * N + n2] = s02; c[m * N + n3] = s03;
      c[m1 * N + n] = s10; c[m1 * N + n1] = s11; c[m1 * N + n2] = s12; c[m1 * N + n3] = s13;
      c[m2 * N + n] = s20; c[m2 * N + n1] = s21; c[m2 * N + n2] = s22; c[m2 * N + n3] = s23;
      c[m3 * N + n] = s30; c[m3 * N + n1] = s31; c[m3 * N + n2] = s32; c[m3 * N + n3] = s33;
    }
  }
  return y;
}
