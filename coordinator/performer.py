"""From what was decided, and is durable, to the deed: an order to an agent, or an agent's end."""

from collections.abc import Callable
from typing import assert_never

from coordinator import actions
from coordinator.agents import AgentServer
from coordinator.attendants import Attendants
from coordinator.charge import Charge
from coordinator.happenings import Happening
from coordinator.orders import (
    Order,
    announce_order,
    kill_order,
    standing_orders,
    start_order,
    terminate_order,
)
from muster.contracts.job import JobUid
from muster.contracts.messages import Dismiss

Hear = Callable[[JobUid, Happening], None]


class Performer:
    """Carries actions out. What comes of them is heard by whoever decided."""

    def __init__(self, attendants: Attendants, hear: Hear) -> None:
        self._attendants = attendants
        self._hear = hear
        self._agents: AgentServer | None = None

    def attach(self, agents: AgentServer) -> None:
        """Name the server through which agents are told; without one they hear nothing."""
        self._agents = agents

    def perform(self, charge: Charge) -> None:
        """Carry out what was decided for a job."""
        decided, charge.decided = charge.decided, []
        for action in decided:
            self._perform_one(charge, action)

    def repeat_orders(self, charge: Charge) -> None:
        """Say again what an agent that has joined may have missed; it ignores what it knows.

        Only what is durable: a decision that is not is performed as soon as it is.
        """
        if charge.has_rejoined and not charge.decided:
            charge.has_rejoined = False
            for order in standing_orders(charge):
                self._send(charge, order)

    def dismiss(self, charge: Charge) -> None:
        """Tell the agent that nothing is left to do."""
        self._send(charge, Dismiss())

    def _perform_one(self, charge: Charge, action: actions.Action) -> None:
        match action:
            case actions.StartAgent():
                self._attendants.start(charge, self._hear)
            case actions.KillAgent():
                self._attendants.kill(charge)
            case actions.DismissAgent():
                self.dismiss(charge)
                self._attendants.see_off(charge)
            case actions.Start():
                self._send(charge, start_order(charge, action.rank))
            case actions.Terminate():
                self._send(charge, terminate_order(charge, action.rank))
            case actions.KillProcess():
                self._send(charge, kill_order(charge, action.rank))
            case actions.Announce():
                self._send(charge, announce_order(charge))
            case actions.Suspect() | actions.Move() | actions.Enlist() | actions.Retire():
                pass
            case _:
                assert_never(action)

    def _send(self, charge: Charge, message: Order) -> None:
        if self._agents is not None:
            self._agents.send(charge.snapshot.uid, message)
