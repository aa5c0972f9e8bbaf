"""The paper in plain NumPy, float64: the oracle for all tests.

Written from the paper (Algorithm 1, section 4.2 for NG_adap and CLIP, Algorithm 2 of
the appendix) and the papers of the base methods, not from `keras_bng`. Blocks are lists
of positions. Gradients and weights are lists of arrays. No cleverness. (RMS, and norms
other than the Euclidean, are not of the paper.)
"""

import numpy as np


def block_norm(arrays):
    return np.sqrt(sum(np.sum(np.float64(a) ** 2) for a in arrays))


def absolute_sum(arrays):
    return sum(np.sum(np.abs(np.float64(a))) for a in arrays)


def largest(arrays):
    return np.max([np.max(np.abs(np.float64(a)), initial=0) for a in arrays])


NORMS = {"l2": block_norm, "l1": absolute_sum, "max": largest}


def unit(gradient_norm, weight_norm, ones_norm):
    return 1 / gradient_norm


def rms(gradient_norm, weight_norm, ones_norm):
    """Of ones, the root mean square is 1; so is the mean, and the largest."""
    return ones_norm / gradient_norm


def adaptive(ratio):
    return lambda gradient_norm, weight_norm, _: (
        ratio * (weight_norm or 1) / gradient_norm
    )


def clip(threshold):
    return lambda gradient_norm, *_: min(1, threshold / gradient_norm)


def normalize(gradients, weights, blocks, rule, norm="l2"):
    """Algorithm 1, line 3, and its variations: block gradient times one number."""
    result = [np.float64(g) for g in gradients]
    for block in blocks:
        gradient_norm = NORMS[norm]([gradients[i] for i in block])
        weight_norm = NORMS[norm]([weights[i] for i in block])
        ones_norm = NORMS[norm]([np.ones(np.shape(weights[i])) for i in block])
        for i in block:
            if not np.isfinite(gradient_norm) or gradient_norm == 0:
                result[i] = np.zeros_like(result[i])
            elif rule is not None:
                factor = rule(gradient_norm, weight_norm, ones_norm)
                result[i] = result[i] * factor
    return result


class Method:
    """A base method stepped on (normalized) gradients."""

    def __init__(self, weights, blocks, rule=unit, l2=0.0, norm="l2", **settings):
        self.weights = [np.float64(w) for w in weights]
        self.blocks, self.rule, self.l2, self.norm = blocks, rule, l2, norm
        self.t = 0
        vars(self).update({**self.defaults, **settings})
        self.state = [[np.zeros_like(w) for _ in range(2)] for w in self.weights]

    def step(self, gradients):
        self.t += 1
        scaled = normalize(gradients, self.weights, self.blocks, self.rule, self.norm)
        scaled = [g + self.l2 * w for g, w in zip(scaled, self.weights)]
        for i, gradient in enumerate(scaled):
            self.weights[i] = self.update(self.weights[i], gradient, self.state[i])


class SGDM(Method):
    defaults = {"learning_rate": 0.01, "momentum": 0.9}

    def update(self, w, g, state):
        state[0] = self.momentum * state[0] - self.learning_rate * g
        return w + state[0]


class Adam(Method):
    """Kingma & Ba, with the efficient order of computation at the end of section 2."""

    defaults = {"learning_rate": 1e-3, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8}

    def update(self, w, g, state):
        state[0] = self.beta_1 * state[0] + (1 - self.beta_1) * g
        state[1] = self.beta_2 * state[1] + (1 - self.beta_2) * g**2
        rate = self.learning_rate * np.sqrt(1 - self.beta_2**self.t)
        rate /= 1 - self.beta_1**self.t
        return w - rate * state[0] / (np.sqrt(state[1]) + self.epsilon)


class AdaGrad(Method):
    defaults = {"learning_rate": 0.01, "epsilon": 1e-7}

    def update(self, w, g, state):
        state[0] = state[0] + g**2
        return w - self.learning_rate * g / np.sqrt(state[0] + self.epsilon)


class RMSProp(Method):
    defaults = {"learning_rate": 1e-3, "rho": 0.9, "epsilon": 1e-7}

    def update(self, w, g, state):
        state[0] = self.rho * state[0] + (1 - self.rho) * g**2
        return w - self.learning_rate * g / np.sqrt(state[0] + self.epsilon)


class AdaGradBNG(Method):
    """Algorithm 2, line by line.

    L2 is not of the paper. It is part of the gradient after normalization, as in all
    other methods; the raw gradient is that one at its own length, the norm of `g`.
    """

    defaults = {"learning_rate": 0.01, "delta": 1e-8}

    def step(self, gradients):
        g = normalize(gradients, self.weights, self.blocks, unit, self.norm)
        for block in self.blocks:
            norm = NORMS[self.norm]([gradients[i] for i in block])
            norm = norm if np.isfinite(norm) else 0.0
            for i in block:
                direction = g[i] + self.l2 * self.weights[i]
                self.state[i][0] = self.state[i][0] + direction**2
                tau = self.learning_rate * norm
                tau = tau / (self.delta + np.sqrt(self.state[i][0]))
                self.weights[i] = self.weights[i] - tau * direction
