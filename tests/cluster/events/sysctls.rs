//! The sysctls of conntrack, in a network namespace other than the machine's.

use std::time::Duration;

use anyhow::{Context, Result};
use proxy_agent::conntrack::sysctl::apply;
use proxy_agent::settings::Conntrack;
use proxy_net::changes::{Changes, Wanted};
use proxy_source::events::Events;
use testbed::netns::NetNs;

#[test]
fn settings_are_written_where_permitted_and_reported_elsewhere() -> Result<()> {
    let node = NetNs::create(format!("kpx-{}-sysctls", std::process::id()))?;
    let read = |key: &str| {
        let value = node.read(&format!("/proc/sys/net/netfilter/nf_conntrack_{key}"));
        value.and_then(|value| value.trim().parse::<u32>().context("a number"))
    };
    let max = read("max")?;
    let settings = Conntrack {
        tcp_established_timeout: Some(Duration::from_secs(86_400)),
        tcp_close_wait_timeout: Some(Duration::from_secs(3_600)),
        tcp_be_liberal: true,
        udp_timeout: Some(Duration::ZERO),
        udp_stream_timeout: Some(Duration::from_secs(77)),
        ..Conntrack::default()
    };
    let udp_timeout = read("udp_timeout")?;
    let dir = tempfile::tempdir()?;
    let changes = Changes::new(dir.path());
    let before = read("tcp_timeout_established")?;
    let reported = |settings: &Conntrack| {
        let (events, queue) = Events::new("n1");
        node.run(|| apply(settings, &changes, &events));
        queue.waiting()
    };
    assert_eq!(reported(&settings), 0);
    let values = [
        "tcp_timeout_established",
        "tcp_timeout_close_wait",
        "tcp_be_liberal",
        "udp_timeout_stream",
    ];
    let values = values.map(read).into_iter().collect::<Result<Vec<_>>>()?;
    assert_eq!(values, [86_400, 3_600, 1, 77]);
    assert_eq!(read("udp_timeout")?, udp_timeout, "0 leaves it as it is");

    // Only the machine's own namespace may size the table. A correct value is left unwritten.
    let sized = |min| Conntrack {
        max_per_core: Some(1),
        min: Some(min),
        ..Conntrack::default()
    };
    assert_eq!(reported(&sized(max)), 0);
    assert_eq!(reported(&sized(max + 1)), 1);
    assert_eq!(read("max")?, max);

    // Another program has changed one of them since.
    node.sysctl("netfilter/nf_conntrack_udp_timeout_stream", "78")?;
    node.run(|| changes.undo(&Wanted::new(), &mut |_| {}))?;
    assert_eq!(read("tcp_timeout_established")?, before);
    assert_eq!(read("udp_timeout_stream")?, 78);
    Ok(())
}
