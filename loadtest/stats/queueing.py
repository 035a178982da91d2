"""What queueing theory expects of one server or several alike, for requests that come at random.

Arrivals are a Poisson process, the line is as long as it gets, first come is first served, nobody
leaves it, and a service takes as long whoever waits. What is measured or simulated under these
assumptions has to agree. Sources: A. K. Erlang, "Solution of some Problems in the Theory of
Probabilities of Significance in Automatic Telephone Exchanges" (1917); the formulas in the form of
L. Kleinrock, "Queueing Systems, Volume I: Theory" (Wiley 1975).

`service_s` is the mean time of one service. Every mean waiting time here is from arrival to the
beginning of service. All functions raise ValueError for times and rates that are negative, and
waiting times for a load that the servers are not through with faster than it comes: there the line
grows for ever.
"""

from __future__ import annotations


def utilization(arrivals_per_s: float, service_s: float, servers: int = 1) -> float:
    """The share of their time that the servers are busy; at 1 and above, what they would have to
    be."""
    if not (arrivals_per_s >= 0 and service_s >= 0):
        raise ValueError(f"no load: {arrivals_per_s:g} arrivals per second of {service_s:g} s each")
    if servers < 1:
        raise ValueError(f"there has to be at least one server, not {servers}")
    return arrivals_per_s * service_s / servers


def mg1_wait_s(arrivals_per_s: float, service_s: float, squared_variation: float) -> float:
    """M/G/1: one server, services of any distribution. `squared_variation` is the variance of the
    service time over the square of its mean. The formula of Pollaczek (1930) and Khinchine (1932);
    Kleinrock 5.6."""
    if not squared_variation >= 0:
        raise ValueError(f"a squared variation is not negative, as {squared_variation:g} is")
    busy = _stable(utilization(arrivals_per_s, service_s))
    return busy / (1 - busy) * service_s * (1 + squared_variation) / 2


def mm1_wait_s(arrivals_per_s: float, service_s: float) -> float:
    """M/M/1: one server, exponential service times."""
    return mg1_wait_s(arrivals_per_s, service_s, squared_variation=1.0)


def md1_wait_s(arrivals_per_s: float, service_s: float) -> float:
    """M/D/1: one server, every service takes the same: half of M/M/1's waiting time."""
    return mg1_wait_s(arrivals_per_s, service_s, squared_variation=0.0)


def mmc_wait_s(arrivals_per_s: float, service_s: float, servers: int) -> float:
    """M/M/c: several servers with one common line, exponential service times; Kleinrock 3.5."""
    busy = _stable(utilization(arrivals_per_s, service_s, servers))
    return erlang_c(arrivals_per_s * service_s, servers) * service_s / (servers * (1 - busy))


def erlang_c(offered: float, servers: int) -> float:
    """The probability that a request has to wait, with `offered` times as much work as one server
    can do: Erlang's second formula (C), by the recursion of his first one (B), which neither
    overflows nor loses digits."""
    busy = _stable(utilization(offered, 1.0, servers))
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    return blocked / (1 - busy * (1 - blocked))


def _stable(busy: float) -> float:
    if busy >= 1:
        raise ValueError(f"at a utilization of {busy:.3g} the line grows for ever")
    return busy
