"""What a cache error does to attention, and why: one module for each study.

A layer study has `measure(layer, protocol, generator)`, called once for each captured attention,
and `summarize(layers, protocol)` of what it returned for all of them. A model study has
`measure(model, protocol)`, which runs after the layers, and `check(run)`, which refuses before any
work what it cannot do. All return what JSON can hold. To add one:
write the module, add its line here.
"""

LAYER_STUDIES = {
    "matched_error": "quantmla.analysis.matched_error",
    "gain": "quantmla.analysis.gain",
    "interventions": "quantmla.analysis.interventions",
    "split": "quantmla.analysis.split",
    "bound": "quantmla.analysis.bound",
    "centring": "quantmla.analysis.centring",
}
MODEL_STUDIES = {"sensitivity": "quantmla.analysis.sensitivity"}
