"""A backend in numpy that knows nothing of the others: sync only, a star of sockets for the all-reduce."""

import hmac
import socket
import struct
import time

import numpy as np

from crosstrain.backends.base import Availability, CalibrationResult, EvalResult, State, StepResult, calibration_batches, make_sampler
from crosstrain.backends.capabilities import Capabilities
from crosstrain.backends.placement import ranks_placement
from crosstrain.backends.timing import repeat
from crosstrain.core.cluster import split_evenly
from crosstrain.core.plugins import forward_plugin, load
from crosstrain.core.update_rules import FIRST_MOMENT, MOMENTUM, SECOND_MOMENT, slot_names


class Star:
    """Sums a float64 vector over all ranks: everyone sends to rank 0, which adds in rank order and sends the sum back."""

    def __init__(self, task, timeout):
        self.peers = []
        self.rank = task.rank
        ranks = task.cluster.of_role("worker")
        if len(ranks) == 1:
            return
        host, port = task.cluster.endpoint(ranks[0])
        secret = task.cluster.secret.encode()
        if self.rank == 0:
            with socket.create_server((host, port), backlog=len(ranks)) as server:
                server.settimeout(timeout)
                joined = {}
                while len(joined) < len(ranks) - 1:
                    peer, _ = server.accept()
                    greeting = self.receive(peer, 36)
                    rank = struct.unpack("!i", greeting[:4])[0]
                    if hmac.compare_digest(greeting[4:], hmac.digest(secret, greeting[:4], "sha256")):
                        joined[rank] = peer
                    else:
                        peer.close()
            self.peers = [joined[rank] for rank in sorted(joined)]
        else:
            deadline = time.monotonic() + timeout
            while True:
                try:
                    peer = socket.create_connection((host, port), timeout=timeout)
                    break
                except ConnectionRefusedError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)
            number = struct.pack("!i", self.rank)
            peer.sendall(number + hmac.digest(secret, number, "sha256"))
            self.peers = [peer]

    def receive(self, peer, count):
        received = bytearray()
        while len(received) < count:
            piece = peer.recv(count - len(received))
            if not piece:
                raise ConnectionError("a rank has gone")
            received += piece
        return bytes(received)

    def sum(self, values):
        values = np.asarray(values, dtype=np.float64)
        if not self.peers:
            return values
        if self.rank == 0:
            for peer in self.peers:
                values = values + np.frombuffer(self.receive(peer, values.nbytes)).reshape(values.shape)
            for peer in self.peers:
                peer.sendall(values.tobytes())
            return values
        self.peers[0].sendall(values.tobytes())
        return np.frombuffer(self.receive(self.peers[0], values.nbytes)).reshape(values.shape)


class ToySession:
    def __init__(self, task, job, model, data):
        self.job, self.data, self.model = job, data, model
        self.forward = load(forward_plugin(job.model, "toy"), "forward")
        self.sampler = make_sampler(job, data)
        self.rank, self.world = task.rank, len(task.cluster.of_role("worker"))
        self.star = Star(task, job.start_timeout)
        self.inputs = {split: data.inputs(split) for split in ("train", "test")}
        self.star.sum([0.0])
        self.load_values(State(model.initial(job.seed)))

    def load_values(self, state):
        self.values = {name: value.astype(np.float64) for name, value in state.parameters.items()}
        zeros = {name: np.zeros_like(value) for name, value in self.values.items()}
        slots = state.slots or {}
        self.first = {name: value.astype(np.float64) for name, value in slots.get(FIRST_MOMENT, slots.get(MOMENTUM, zeros)).items()}
        self.second = {name: value.astype(np.float64) for name, value in slots.get(SECOND_MOMENT, zeros).items()}
        self.updates = state.updates

    def errors(self, split, indices):
        x, labels = self.inputs[split][indices], self.data.labels(split)[indices]
        logits = self.forward.forward(self.values, x, training=True)
        shifted = logits - logits.max(axis=1, keepdims=True) if len(indices) else logits
        log_sum = np.log(np.exp(shifted).sum(axis=1))
        rows = np.arange(len(indices))
        losses = log_sum - shifted[rows, labels]
        error = np.exp(shifted - log_sum[:, None])
        correct = int((logits.argmax(axis=1) == labels).sum()) if len(indices) else 0
        error[rows, labels] -= 1
        return x, losses, error, correct

    def train(self, plan):
        begin = time.perf_counter()
        batches = self.sampler.for_rank(plan.epoch, plan.first_in_epoch, plan.count, self.rank, plan.skip, plan.arranged)
        losses = []
        for position, rate in enumerate(plan.learning_rates):
            x, each, error, _ = self.errors("train", batches.batch(position))
            weight = batches.weights[position]
            gradients = self.forward.backward(self.values, x, error / weight)
            flat = np.concatenate([[each.sum() / weight], *(gradients[name].ravel() for name in self.values)])
            flat = self.star.sum(flat)
            losses.append(flat[0])
            self.apply(flat[1:], rate)
        examples = int(batches.examples.sum())
        yield StepResult(plan.first_step, np.array(losses, dtype=np.float32), examples, time.perf_counter() - begin)

    def apply(self, flat, rate):
        job, start = self.job, 0
        self.updates += 1
        for name, value in self.values.items():
            gradient = flat[start : start + value.size].reshape(value.shape)
            start += value.size
            if job.optimizer == "sgd":
                gradient = gradient + job.weight_decay * value
                if job.momentum:
                    self.first[name] = job.momentum * self.first[name] + gradient
                    gradient = gradient + job.momentum * self.first[name] if job.nesterov else self.first[name]
                value -= rate * gradient
                continue
            if job.optimizer == "adamw":
                value *= 1 - rate * job.weight_decay
            else:
                gradient = gradient + job.weight_decay * value
            self.first[name] = job.beta1 * self.first[name] + (1 - job.beta1) * gradient
            self.second[name] = job.beta2 * self.second[name] + (1 - job.beta2) * gradient**2
            root = np.sqrt(self.second[name] / (1 - job.beta2**self.updates))
            value -= rate / (1 - job.beta1**self.updates) * self.first[name] / (root + job.epsilon)

    def drain(self):
        return iter(())

    def evaluate(self, split):
        begin = time.perf_counter()
        start, stop = split_evenly(self.data.info.sizes[split], self.world)[self.rank]
        _, losses, _, correct = self.errors(split, np.arange(start, stop))
        sums = self.star.sum([losses.sum(), correct, len(losses)]).tolist()
        return EvalResult.of(self.model.objective, split, self.data.info.sizes[split], sums, time.perf_counter() - begin, self.updates)

    def predict(self, split, start, stop):
        return self.forward.forward(self.values, self.inputs[split][start:stop], training=False).astype(np.float32)

    def state(self):
        def narrow(values):
            return {name: value.astype(np.float32) for name, value in values.items()}

        kept = {MOMENTUM: self.first, FIRST_MOMENT: self.first, SECOND_MOMENT: self.second}
        return State(narrow(self.values), {name: narrow(kept[name]) for name in slot_names(self.job)}, self.updates)

    def load(self, state):
        given = state or State({name: np.zeros_like(value) for name, value in self.values.items()})

        def spread(values):
            return {name: self.star.sum(values.get(name, np.zeros(self.values[name].shape))) for name in self.values}

        slots = {name: spread(given.slots.get(name, {})) for name in slot_names(self.job)}
        self.load_values(State(spread(given.parameters), slots, int(self.star.sum([given.updates])[0])))

    def calibrate(self, order):
        batches = calibration_batches(self.sampler, self.rank)
        own = batches.batch(0)[: len(batches.batch(0)) // 2] if order.component == "half" else batches.batch(0)
        size = 1 if order.component == "message" else sum(value.size for value in self.values.values())
        step = {
            "data": lambda: (self.inputs["train"][own], self.data.labels("train")[own]),
            "communicate": lambda: self.star.sum(np.zeros(size)),
            "message": lambda: self.star.sum(np.zeros(size)),
        }.get(order.component, lambda: self.compute_alone(own))
        step()  # whoever is early waits here
        return [CalibrationResult(self.rank, *repeat(order, lambda times: [step() for _ in range(times)]))]

    def compute_alone(self, own):
        x, _, error, _ = self.errors("train", own)
        gradients = self.forward.backward(self.values, x, error)
        self.apply(np.concatenate([gradients[name].ravel() for name in self.values]), 0.0)

    def close(self):
        for peer in self.star.peers:
            peer.close()


class ToyBackend:
    name = "toy"
    capabilities = Capabilities(packages={"numpy": ["numpy"]}, install="pip install numpy")  # sync mode, fp32, on the CPU, and no more

    def probe(self):
        return Availability(self.name, np.__version__, ("cpu",))

    def placement(self, job):
        return ranks_placement(job)

    def preload(self, job):
        pass  # numpy is all it needs

    def open(self, task, job, model, data):
        return ToySession(task, job, model, data)


BACKEND = ToyBackend()
