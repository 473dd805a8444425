"""Trains on boards of a second size, too: for networks whose weights fit every size, such as houses.py.

    python train.py config/sudoku_houses.py    (it runs this fork)

Each other_interval-th step trains on the second dataset. Each size has a model, and both models have the same
weights. The evaluations and the log's FLOPs are those of data_path's boards. It runs on CPUs and CUDA GPUs:
XLA's program of a step would not see the second sequences.
"""
import copy

import data
import train
from runtime.errors import UserError
from weights import fits_every_size

new(
    other_data_path="data/sudoku-6x6-3k",  # the second dataset, as data_path
    other_data_prepare="",  # as data_prepare
    other_interval=3,  # steps
)

_length_of = train.length_of
_make_inputs = train.make_inputs
_train_step = train.train_step


def second_set(settings, train_set):
    """Returns the second dataset, which the first one keeps."""
    if not hasattr(train_set, "second"):
        others = copy.copy(settings)
        others.data_path = settings.other_data_path
        others.data_prepare = settings.other_data_prepare
        train_set.second, _ = data.load(data.get_dataset(others, train.STOP.is_set))
    return train_set.second


def length_of(settings, train_set, start):
    # a run calls this when it has opened its dataset, before it compares the data with its checkpoint's
    if settings.other_interval < 1:
        raise UserError(f"other_interval={settings.other_interval} must be at least 1")
    if not settings.eval_only:
        # a resume on another second dataset is refused, as on another first one
        train_set.sha256 = data.json_hash([train_set.sha256, second_set(settings, train_set).sha256])
    return _length_of(settings, train_set, start)


class Run(train.Run):
    """Training state with a second model, and with sequences of its boards."""
    other_model = None

    def restart_sequences(self):
        super().restart_sequences()
        self.other_sequences = None

    def build_other_model(self, dataset):
        """Builds the model of the second size; train_step gives it the weights of run.state."""
        if self.device.captures_steps or not fits_every_size(self.model):
            raise UserError("examples/sizes.py needs a network whose weights fit every size, as houses.py's "
                            "do, and a CPU or a CUDA GPU")
        self.other_model = train.new_model(self.settings, dataset)
        self.other_model.load_state_dict(self.buffers(), strict=False)
        self.device.prepare(self.other_model)
        self.other_step = self.device.compile(self.other_model.call_with)

    def swap(self):
        """Exchanges what the two sizes do not share."""
        self.model, self.other_model = self.other_model, self.model
        self.supervision_step, self.other_step = self.other_step, self.supervision_step
        self.state["sequences"], self.other_sequences = self.other_sequences, self.state["sequences"]


def make_inputs(run, train_set, step, total_steps):
    second = second_set(run.settings, train_set)
    if run.other_model is None:
        run.build_other_model(second)
    run.is_others_turn = step % run.settings.other_interval == run.settings.other_interval - 1
    return _make_inputs(run, second if run.is_others_turn else train_set, step, total_steps)


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


train.length_of = length_of
train.Run = Run
train.make_inputs = make_inputs
train.train_step = train_step
