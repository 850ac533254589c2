"""Stand-ins that record what is called on them, in which order."""


class Calls(list):
    """calls.note(name): a function that records its arguments and returns `result`."""

    def note(self, name, result=None):
        def call(*args, **settings):
            self.append((name, args, settings))
            if isinstance(result, BaseException):
                raise result
            return result() if callable(result) else result

        return call

    @property
    def names(self):
        return [name for name, *_ in self]

    def named(self, name):
        """(positional arguments, others) of each call of this name."""
        return [(args, settings) for called, args, settings in self if called == name]


class Recorded:
    """Any method is recorded as NAME.METHOD and returns what `results` has for it; other attributes
    are set on it.
    """

    def __init__(self, calls, name, **results):
        self._calls, self._name, self._results = calls, name, results

    def __getattr__(self, method):
        return self._calls.note(f"{self._name}.{method}", self._results.get(method))
