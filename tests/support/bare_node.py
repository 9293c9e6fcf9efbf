"""A node without services, as one that may lead whenever it is the best: no rows bind it."""

import signal

from cli.node import joining
from cli.output import say
from cli.services.record import ServiceRecord, service_lock, service_settings, write_record
from muster.contracts.settings.paths import DataDir
from muster.host.processes import this_process
from muster.mesh.node import Node


def main() -> None:
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    files = DataDir(service_settings().data_dir)
    with service_lock(files), joining() as own:
        Node(own.network, files.election, say)
        port = own.network.port
        record = ServiceRecord(
            url="", process=this_process(), log=None, is_ending=False, node_port=port
        )
        write_record(files, record)
        signal.sigwait(signals)


if __name__ == "__main__":
    main()
