"use strict";
// What a page needs besides engine.js: the attempts at a question, and of puzzles/ the rules and the
// symmetries, with the names that they have there. It runs in a worker, after engine.js and after MODELS,
// which export.py writes: [{run, tasks, puzzles, settings, weights}].

const EMPTY = 1, WALL = 1, OPEN = 2, START = 3, GOAL = 4, PATH = 5;  // tokens
// {rows of a Sudoku: rows and columns of a box}
const BOXES = {4: [2, 2], 6: [2, 3], 9: [3, 3], 12: [3, 4], 16: [4, 4]};

// ---------------------------------------------------------------------------------------------------------
// The requests

const model = MODELS[Number(self.name)] ?? MODELS[0];  // the page names the worker by the model's number
const weights = weights_of(model);
// {task, trm} of each size that the weights fit
const sizes = model.tasks.map(task => {
  task.symbols = [...task.symbols];  // whole characters, some of which have two units of UTF-16
  return {task, trm: network_of(task)};
});

// A request comes with a port. Each message through the port asks for the next line of the answer, so that
// it ends where the page no longer asks.
self.onmessage = ({data: request, ports: [port]}) => {
  const lines = solve(request);
  port.onmessage = () => {
    try {
      port.postMessage(lines.next());
    } catch (e) {
      port.postMessage({value: {error: e.message}});
    }
  };
};

// Yields the answer to a request {question, steps, attempts, seed}: the request with the known answer and a
// warning; then after each step of each attempt {attempt, answer, sure}, and {broken, solved} if a judge
// knows the rules.
function* solve(request) {
  const {run} = model;
  const {task, trm} = sizes.find(({task}) => cells_of(task) === [...request.question].length);
  const question = [...request.question].map(symbol => task.symbols.indexOf(symbol, 1));
  const known = model.puzzles.find(puzzle => puzzle.question === request.question);
  yield {...request, answer: known?.answer ?? null, warning: check_question(task, question)};
  let attempt = 0, surest = 0;
  for (const symmetry of symmetries(task, question, request.seed)) {
    attempt += 1;
    const copy = apply(symmetry, question);
    let state = trm.first_state();
    let last = "", repeats = 0;
    for (let i = 0; i < request.steps; i++) {
      const step = trm.supervision_step(state, copy);
      state = step.state;
      const tokens = undo(symmetry, step.answers);
      const sure = 1 / (1 + Math.exp(-step.q_halt));
      surest = Math.max(surest, sure);
      const text = tokens.map(token => task.symbols[token]).join("");
      yield {attempt, answer: text, sure, ...JUDGES[task.kind]?.(task, question, tokens)};
      // an attempt ends once its answer stays, as in evaluate.py
      repeats = text === last ? repeats + 1 : 0;
      last = text;
      if (run.patience && repeats >= run.patience) break;
    }
    if (surest >= run.sure || attempt >= request.attempts) break;
  }
}

// Returns the network for the questions of a task.
function network_of(task) {
  const settings = {...model.settings, seq_len: cells_of(task), vocab_size: task.symbols.length};
  if (!("L_level.layers.0.across_lines.weight" in weights)) return new TRM(settings, weights);
  const units = units_of(task), num_lines = task.grid[0] + task.grid[1];
  return new UnitTRM(settings, weights, {lines: units.slice(0, num_lines), boxes: units.slice(num_lines)});
}

// Returns the sizes of a model's puzzles, {grid, symbols}; tasks may be there several times.
function sizes_of({tasks}) {
  const size_of = ({grid, symbols}) => ({grid, symbols: [...symbols].slice(1).join("")});
  return [...new Map(tasks.map(task => [cells_of(task), size_of(task)])).values()];
}

function cells_of({grid: [rows, columns]}) {
  return rows * columns;
}

// Returns {name: matrix} of the weights, each [rows, columns, base64 of bfloat16 or of float32].
function weights_of({weights}) {
  return Object.fromEntries(Object.entries(weights).map(([name, [rows, columns, text]]) => {
    const bytes = Uint8Array.from(atob(text), character => character.charCodeAt(0));
    let {buffer} = bytes;
    // a bfloat16 is the first half of a float32
    if (bytes.length === 2 * rows * columns) {
      buffer = Uint32Array.from(new Uint16Array(buffer), half => half << 16).buffer;
    }
    return [name, matrix(rows, columns, new Float32Array(buffer))];
  }));
}

// ---------------------------------------------------------------------------------------------------------
// Rules: functions of (task, question, answer) that return {broken: the cells that break a rule, solved}

const JUDGES = {sudoku: judge_sudoku, maze: judge_maze};
const SOLVERS = {sudoku: num_solutions, maze: num_paths};

const WARNINGS = {
  "1": "",
  "2": "the puzzle has more than one solution",
  "-1": "not decided whether the puzzle has one solution: the search was too long",
};

// Returns a warning unless a question has one solution, else "". Throws an Error if it has none.
function check_question(task, question) {
  const count = SOLVERS[task.kind]?.(task, question) ?? 1;
  if (count) return WARNINGS[count];
  // two givens may break a rule
  const cell = JUDGES[task.kind](task, question, question).broken.find(i => question[i] > EMPTY);
  const [row, column] = [Math.floor(cell / task.grid[1]), cell % task.grid[1]];
  const where = cell >= 0 ? `: row ${row + 1}, column ${column + 1} breaks a rule` : "";
  throw new Error("the puzzle has no solution" + where);
}

// Returns the units of a puzzle, each a list of its cells: rows, columns, and a Sudoku's boxes.
function units_of({grid: [rows, columns], units = [[1, columns], [rows, 1], BOXES[rows]]}) {
  const cells = range(rows * columns);
  return units.flatMap(([height, width]) => {
    const unit_of = cell => Math.floor(cell / columns / height) * (columns / width)
      + Math.floor(cell % columns / width);
    return range(cells.length / (height * width)).map(unit => cells.filter(cell => unit_of(cell) === unit));
  });
}

// Returns for each cell of a Sudoku the other cells of its row, column and box.
function peers_of(task) {
  const units = units_of(task);
  return range(cells_of(task)).map(i =>
    [...new Set(units.filter(unit => unit.includes(i)).flat())].filter(j => j !== i));
}

// Cells are broken that are empty, differ from a given, or share a unit with an equal digit.
function judge_sudoku(task, question, answer) {
  const peers = peers_of(task);
  const broken = range(answer.length).filter(i => answer[i] <= EMPTY
    || question[i] > EMPTY && answer[i] !== question[i] || peers[i].some(j => answer[j] === answer[i]));
  return {broken, solved: !broken.length};
}

// Returns the number of solutions of a Sudoku, counted up to 2: it tries the digits of the cell that has the
// fewest, depth first. After 100,000 cells, fewer on boards above 9x9, about two seconds, it gives up and says
// -1.
function num_solutions(task, question) {
  const peers = peers_of(task), board = [...question], digits = range(task.grid[0]).map(i => i + 2);
  if (question.some((token, i) => token > EMPTY && peers[i].some(j => question[j] === token))) return 0;
  let cells_left = 100_000 * Math.min(1, 81 / board.length) ** 2;
  const count = () => {
    cells_left -= 1;
    let cell = -1, candidates = digits;
    for (const i of range(board.length)) {
      if (board[i] !== EMPTY) continue;
      const taken = peers[i].reduce((bits, j) => bits | 1 << board[j], 0);
      const free = digits.filter(digit => !(taken >> digit & 1));
      if (cell < 0 || free.length < candidates.length) [cell, candidates] = [i, free];
    }
    if (cell < 0) return 1;
    let found = 0;
    for (const digit of candidates) {
      board[cell] = digit;
      found += count();
      if (found > 1 || cells_left <= 0) break;
    }
    board[cell] = EMPTY;
    return Math.min(found, 2);
  };
  const found = count();
  return cells_left > 0 ? found : -1;
}

// Cells are broken that differ from the question's, but for the path on open cells.
function judge_maze(task, question, answer) {
  const broken = range(answer.length).filter(i =>
    answer[i] !== question[i] && !(question[i] === OPEN && answer[i] === PATH));
  // the path alone must lead from S to G, in as few steps as the open cells do, and have no other cell
  const line = answer.map(token => token === OPEN ? WALL : token);
  const steps = fewest_steps(task, question), path = answer.filter(token => token === PATH);
  return {broken, solved: !broken.length && steps === fewest_steps(task, line) && steps === path.length + 1};
}

// Returns 1 for a maze with a path from the one start to the one goal, else 0.
function num_paths(task, question) {
  const has_one = end => question.filter(token => token === end).length === 1;
  return has_one(START) && has_one(GOAL) && fewest_steps(task, question) ? 1 : 0;
}

// Returns the steps from S to G, 0 if no way leads there.
function fewest_steps({grid: [, columns]}, maze) {
  const steps = new Map([[maze.indexOf(START), 0]]);
  for (const [i, count] of steps) {  // the cells that are added here come later
    if (maze[i] === GOAL) return count;
    const column = i % columns, near = [i - columns, i + columns];
    if (column > 0) near.push(i - 1);
    if (column < columns - 1) near.push(i + 1);
    for (const j of near) if (maze[j] > WALL && !steps.has(j)) steps.set(j, count + 1);
  }
  return 0;
}

// ---------------------------------------------------------------------------------------------------------
// Symmetries: {cells, tokens}, where cell i of a copy has tokens[question[cells[i]]]

const SYMMETRIES = {sudoku: sudoku_symmetry, maze: (task, random) => turn(task, {dihedral: true}, random)};
const DRAWS_IN_VAIN = 32;  // without a new copy of a puzzle, after which no more are expected

// Returns a function of (task, random) that draws a symmetry; undefined if none are known.
function drawing_of({kind, symmetries}) {
  return SYMMETRIES[kind] ?? (symmetries && ((task, random) => turn(task, symmetries, random)));
}

// Yields the symmetry that changes nothing, and random ones that make different copies of the question.
function* symmetries(task, question, seed) {
  yield {cells: range(question.length), tokens: range(task.symbols.length)};
  const draw = drawing_of(task);
  const random = generator(seed), made = new Set([question.join()]);
  for (let in_vain = 0; draw && in_vain < DRAWS_IN_VAIN; in_vain++) {
    const symmetry = draw(task, random), copy = apply(symmetry, question).join();
    if (made.has(copy)) continue;
    made.add(copy);
    in_vain = -1;
    yield symmetry;
  }
}

function apply({cells, tokens}, board) {
  return cells.map(cell => tokens[board[cell]]);
}

function undo({cells, tokens}, copy) {
  const board = [];
  cells.forEach((cell, i) => { board[cell] = tokens.indexOf(copy[i]); });
  return board;
}

// It permutes the digits, the bands, the rows of each band, the stacks and the columns of each stack; if
// boxes are square, it transposes half of the boards.
function sudoku_symmetry({grid: [size]}, random) {
  const [rows, columns] = BOXES[size];
  const order = members => shuffled(range(size / members), random).flatMap(group =>
    shuffled(range(members), random).map(member => group * members + member));
  const rows_from = order(rows), columns_from = order(columns), digits = range(size).map(i => i + 2);
  const is_transposed = rows === columns && random() < 0.5;
  return {
    cells: rows_from.flatMap(i => columns_from.map(j => is_transposed ? j * size + i : i * size + j)),
    tokens: [0, EMPTY, ...shuffled(digits, random)],
  };
}

// It turns a square in one of 8 ways, and lets symbols change places; described: as in task.symmetries.
function turn({grid: [rows, columns], symbols}, {dihedral, permute_symbols = ""}, random) {
  const [is_transposed, flips_rows, flips_columns] = range(3).map(() => dihedral && random() < 0.5);
  const cells = range(rows * columns).map(cell => {
    let row = Math.floor(cell / columns), column = cell % columns;
    if (flips_rows) row = rows - 1 - row;
    if (flips_columns) column = columns - 1 - column;
    return is_transposed ? column * columns + row : row * columns + column;
  });
  const exchanged = [...permute_symbols].map(symbol => symbols.indexOf(symbol, 1));
  const tokens = range(symbols.length), to = shuffled(exchanged, random);
  exchanged.forEach((token, i) => { tokens[token] = to[i]; });
  return {cells, tokens};
}

function range(count) {
  return [...Array(count).keys()];
}

function shuffled(values, random) {
  return values.map(value => [random(), value]).sort(([a], [b]) => a - b).map(([, value]) => value);
}

// Returns a function that draws random numbers from 0 to 1 (mulberry32).
function generator(seed) {
  return () => {
    seed = seed + 0x6D2B79F5 | 0;
    let bits = Math.imul(seed ^ seed >>> 15, seed | 1);
    bits ^= bits + Math.imul(bits ^ bits >>> 7, bits | 61);
    return ((bits ^ bits >>> 14) >>> 0) / 2 ** 32;
  };
}

// ---------------------------------------------------------------------------------------------------------
// The start: the worker describes the model, and names all models of the file

self.postMessage({
  ...model.run,
  attempts: drawing_of(model.tasks[0]) ? model.run.attempts : 1,
  puzzles: model.puzzles,
  sizes: sizes_of(model),
  model: MODELS.indexOf(model),
  models: MODELS.map(model => ({...model.run, sizes: sizes_of(model)})),
});
