"""Lightning's Trainer and Fabric over any algorithm of bagua_comm.

    trainer = Trainer(strategy=BaguaStrategy(ByteGrad()))
    fabric = Fabric(strategy=BaguaFabricStrategy(ByteGrad()))

Processes are started by mpirun, torchrun or `python -m bagua_comm run`. A strategy takes the ranks from its
communicator, so `devices` and `num_nodes` need not be given.
"""

from .fabric import BaguaFabricStrategy
from .packages import FABRICS, TRAINERS, Package
from .trainer import BaguaStrategy

__all__ = ["FABRICS", "TRAINERS", "BaguaFabricStrategy", "BaguaStrategy", "Package"]
