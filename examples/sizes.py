"""Trains on boards of a second size, too: for networks whose weights fit every size, such as houses.py.

    python train.py config/sudoku_houses.py    (it runs this fork)

Each other_interval-th step trains on the second dataset. Each size has a model, and both models have the same
weights. The evaluations and the log's FLOPs are those of data_path's boards. It runs on CPUs and CUDA GPUs:
XLA's program of a step would not see the second sequences.
"""
import copy

import data
import train

new(
    other_data_path="",  # the second dataset, as data_path
    other_data_prepare="",  # as data_prepare
    other_interval=3,  # steps
)

_make_inputs = train.make_inputs
_train_step = train.train_step


class Run(train.Run):
    """Training state with a second model, and with sequences of its boards."""
    other_set = None

    def restart_sequences(self):
        super().restart_sequences()
        self.other_sequences = None

    def open_other_set(self):
        """Loads the second dataset, and builds the model of its boards."""
        settings = copy.copy(self.settings)
        settings.data_path = settings.other_data_path
        settings.data_prepare = settings.other_data_prepare
        self.other_set, _ = data.load(data.get_dataset(settings, train.STOP.is_set))
        self.other_model = train.new_model(settings, self.other_set)
        self.other_model.load_state_dict(self.buffers(), strict=False)
        self.device.prepare(self.other_model)
        self.other_step = self.device.compile(self.other_model.call_with)

    def swap(self):
        """Exchanges what the two sizes do not share."""
        self.model, self.other_model = self.other_model, self.model
        self.supervision_step, self.other_step = self.other_step, self.supervision_step
        self.state["sequences"], self.other_sequences = self.other_sequences, self.state["sequences"]


def make_inputs(run, train_set, step, total_steps):
    if run.other_set is None:
        run.open_other_set()
    run.is_others_turn = step % run.settings.other_interval == run.settings.other_interval - 1
    return _make_inputs(run, run.other_set if run.is_others_turn else train_set, step, total_steps)


def train_step(run, state, inputs, cycles):
    if not run.is_others_turn:
        return _train_step(run, state, inputs, cycles)
    # after a checkpoint, the sequences of both sizes begin anew
    if run.other_sequences is None:
        run.other_sequences = run.device.put(run.other_model.new_sequences(run.batch_size, run.dtype))
    run.swap()
    try:
        return _train_step(run, state, inputs, cycles)
    finally:
        run.swap()


train.Run = Run
train.make_inputs = make_inputs
train.train_step = train_step
