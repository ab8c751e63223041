//! Any text as a file of manifests: what can be read of it, the agent works out tables from; what
//! cannot, has a reason.
#![no_main]

use libfuzzer_sys::fuzz_target;
use proxy_core::desired::Desired;
use proxy_source;

fuzz_target!(|text: &str| {
    let (inputs, problems) = source::of_text(text);
    assert!(problems.values().all(|why| !why.is_empty()), "a problem without a reason: {problems:?}");
    let mut desired = Desired::new("node");
    for input in inputs {
        desired.apply(input);
    }
    let first = desired.sync();
    let again = desired.sync();
    assert!(again.changes.is_empty(), "{:?} after {:?}", again.changes, first.changes);
});
