"""What the findings of a rehearsal cost on Trainium, in words.

Short source names are those of `portable_neuron.facts`; ``measured`` is a third party's published measurement with a 2.12 beta.
Nothing here was measured by us.
"""

from __future__ import annotations

from portable.rehearse.costs import Cost, Costs

_QUEUE = "The queue of the NeuronCore runs empty: the host waits, and each operator after it waits for its own dispatch again."
_SIZE = (
    _QUEUE
    + " The size of the result depends on the data, so everything that uses the result has a new shape, which is compiled."
)
_32_BITS = "The label stays, the arithmetic runs in 32 bits; nothing says so."

COSTS = Costs(
    {
        "compile": Cost(
            "Every operator with a new shape or dtype is compiled by neuronx-cc before it runs: seconds to minutes each, in "
            "eager mode too. The NEFF cache keeps it for later runs.",
            source="torch: best practices; measured (minutes to hours for large graphs)",
        ),
        "graph": Cost(
            "neuronx-cc compiles the whole graph again: minutes for a layer, longer for a model.",
            "Pass dynamic=False, and pad or bucket the inputs so that their shapes repeat.",
            "torch: compile reference",
        ),
        "sync": Cost(_QUEUE, source="torch: best practices; measured (55 to 65 us of dispatch per operator)"),
        "REH-SYNC-BOOLEAN-INDEX": Cost(_SIZE, source="torch: best practices (static shapes only)"),
        "REH-SYNC-NONZERO": Cost(_SIZE, source="torch: best practices (static shapes only)"),
        "REH-SYNC-MASKED-SELECT": Cost(_SIZE, source="torch: best practices (static shapes only)"),
        "REH-SYNC-UNIQUE": Cost(_SIZE, source="torch: best practices (static shapes only)"),
        "fallback": Cost(
            "The package copies the tensors to the host, computes there, and copies back, without a word (a debug log).",
            "Use operators that the device has; torch_neuronx.get_fallback_ops() on the device names those that fell back.",
            "torch: best practices, practice 1; drop",
        ),
        "attention": Cost(
            "The decomposition holds all scores of queries times keys in memory, forward and backward, without a word; 6.4 "
            "times slower than the NKI flash kernel on 4096 tokens.",
            "Give key and value one shape, pad both lengths to a multiple of 512, keep head_dim at 128 or below, "
            "is_causal=True instead of a mask, dropout_p=0.",
            "drop (the gate of eager mode); measured (the factor, prefill)",
        ),
        "refused": Cost("The device raises an error here.", source="drop; for complex numbers assumed, see the profile"),
        "REH-OOM": Cost(
            "A logical core has a quarter of the chip's memory and cannot use another core's; the program ends here.",
            "Use a smaller batch or shorter sequences, activation checkpointing, fully_shard over the logical cores, or "
            "chunks of the loss over a large vocabulary.",
            "arch; measured (NCC_EOOM001)",
        ),
        "REH-MEMORY-FULL": Cost(
            "Compiled programs take scratch memory of the same logical core, which is not counted here.",
            source="measured (NCC_EOOM002)",
        ),
        "REH-WRONG-FLOAT64": Cost(
            _32_BITS + " The NeuronCore has no float64 unit.",
            "Use float32; for sums that need more, split them or add with compensation, or compute on the CPU.",
            "types; drop",
        ),
        "REH-WRONG-INT64": Cost(_32_BITS + " Values beyond 2^31 wrap around.", source="drop; compiler (--native-int64 is off)"),
        "REH-WRONG-INTEGER-MATMUL": Cost(
            "Integer matrix products run through float32, which holds integers to 2^24; nothing says so.", source="types"
        ),
        "REH-WRONG-COLLECTIVE": Cost(
            "Integer sums, and broadcasts, which are sums here, run through float32, exact to 2^24; nothing says so.",
            source="types; drop",
        ),
        "REH-WRONG-ATTENTION": Cost(
            "The package's paths align a causal mask of unequal lengths differently (top left, bottom right); nothing says so.",
            source="drop",
        ),
    }
)
