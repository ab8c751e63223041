//! Compares `docs/cli.md` with the output of the commands.

use std::fmt::Write as _;
use std::net::TcpStream;

use anyhow::{Context, Result, ensure};
use expect_test::expect_file;
use serde_json::Value;
use testbed::agent::{DEADLINE, kpx, wait_until};

use crate::node::{Node, namespace};
use crate::schema::schema;

/// A section: heading, introduction, commands, and true if the form of its data is checked.
struct Section {
    heading: &'static str,
    about: &'static str,
    example: &'static str,
    data: Option<&'static str>,
}

#[test]
fn the_document_shows_what_the_commands_print() -> Result<()> {
    // The examples show packets of the node's own connection.
    let node = Node::start("doc", "--socket-lb off")?;
    let refused = node.ns().run(|| TcpStream::connect("10.96.0.11:80"));
    ensure!(refused.is_err(), "web-old has no endpoints");
    let _connection = node.connect()?;
    // `kpx flows` shows the counts of the last sweep.
    let is_counted = || {
        let is_of_backend = node
            .text("backends --no-headers")?
            .lines()
            .any(|line| line.trim_end().ends_with(" 1"));
        Ok(is_of_backend && node.text("status")?.contains("FLOWS4"))
    };
    wait_until(DEADLINE, "a sweep has counted the connection", is_counted)?;
    let mut text = HEAD.to_owned();
    for section in &SECTIONS {
        let Section {
            heading,
            about,
            example,
            data,
        } = section;
        write!(text, "\n## {heading}\n\n{about}")?;
        write!(
            text,
            "\n```console\n$ kpx {example}\n{}```\n",
            masked(&node.text(example)?)
        )?;
        if let Some(command) = data {
            let json: Value = serde_json::from_str(&node.text(&format!("{command} -o json"))?)?;
            write!(
                text,
                "\n`kpx {command} -o json`:\n\n```text\n{}```\n",
                schema(&json)
            )?;
        }
    }
    text += &check()?;
    text += TAIL;
    expect_file!["../../docs/cli.md"].assert_eq(&text);
    Ok(())
}

/// Returns the findings about this node. Findings about the host differ from machine to machine.
fn check() -> Result<String> {
    let ns = namespace("check")?;
    ns.ip("link add kube-ipvs0 type bridge")?;
    let text = String::from_utf8(kpx(&ns, "check")?.stdout)?;
    let lines = text.lines().filter(|line| {
        ["LEVEL", "ip_forward", "kube-ipvs0"]
            .iter()
            .any(|what| line.contains(what))
    });
    let lines: String = lines.map(|line| format!("{line}\n")).collect();
    let json: Value =
        serde_json::from_slice(&kpx(&ns, "check -o json")?.stdout).context("the report")?;
    Ok(format!(
        "{CHECK}\n```console\n$ kpx check\n{lines}…\n```\n\n`kpx check -o json`:\n\n```text\n{}```\n",
        schema(&json)
    ))
}

/// Replaces variable numbers by `N`, and ports that the kernel or kpx chose by `:ppppp`.
pub(crate) fn masked(text: &str) -> String {
    let lines = text.lines().map(|line| {
        let mut masked = String::new();
        for (index, word) in line.split(' ').enumerate() {
            masked += if index > 0 { " " } else { "" };
            masked += &mask_word(word);
        }
        let counts = ["flow_opened", "forwarded", "returned"]
            .iter()
            .any(|event| line.starts_with(event));
        let end = masked
            .rfind(' ')
            .filter(|_| counts)
            .map_or(masked.len(), |last| last + 1);
        if counts {
            masked[..end].to_owned() + "N\n"
        } else {
            masked + "\n"
        }
    });
    lines.collect()
}

fn mask_word(word: &str) -> String {
    let is_span = word.len() > 1
        && word.ends_with('s')
        && word[..word.len() - 1].chars().all(|c| c.is_ascii_digit());
    if is_span {
        return "Ns".to_owned();
    }
    match word.rsplit_once(':') {
        Some((address, port)) if port.parse::<u16>().is_ok_and(|port| port >= 32_768) => {
            format!("{address}:ppppp")
        }
        _ => word.to_owned(),
    }
}

const HEAD: &str = "\
# The command line

A test writes this document from the commands' output and compares the two (`UPDATE_EXPECT=1 cargo test -p kpx-tests
--test cli the_document` updates it). `kpx COMMAND --help` lists all options of a command. `kpx run` has
[a page of its own](configuration.md).

- **Output.** `-o text` (the default) and `-o wide` are tables for people. `-o json` and `-o yaml` are data with a stable
  form: fields are added, but not renamed, removed or given another type. Each field is listed below with its type, as
  a test finds it in the example. `NAME` stands for the name of a map, a program, a reason or a label. `-o name` of `services` and `backends`
  prints names that other commands take. There is no jsonpath: `-o json | jq` does the same.
- **Which agent.** Commands ask the agent on this machine, by the socket in its run directory (`--run-dir`,
  `/run/kpx` by default). Root may ask, and the members of the group that `kpx run --socket-group` names.
- **Which Services.** `-n NAMESPACE` or `-A`, and `NAME`, `NAMESPACE/NAME` or the same behind `svc/`; all by default. Of an unknown name a similar one is suggested.
  `-l LABELS` of `services`, `backends` and `top` selects by labels, as `kubectl get -l`: `=`, `==`, `!=`, `in (…)`, `notin (…)`, `KEY`, `!KEY`, `>`, `<`. kpx keeps 4 KiB of labels of a Service.
- **Order and changes.** `--sort-by COLUMN` of `services`, `backends`, `flows` and `top`. `-w` (`--watch`) of the first three and of `events` prints the list, and then what is
  new, changed or `gone`, as a row, a line of JSON or a name. Data and names leave out what is gone. `watch -n1 kpx status` does it for `status`.
- **Width.** On a terminal that is too narrow, a table leaves out its least important columns, and sentences continue in the next line; `-o wide` and pipes have every column.
- **Colours** only on a terminal, and not if `NO_COLOR` is set. `--no-headers` leaves out the names of columns.
- **Completion.** `kpx completions bash|zsh|fish|powershell` prints a script. It completes commands, flags and reasons, and asks the agent for
  namespaces, Services, pods, nodes and devices.
- **Words.** A *flow* is an exchange between a client and a backend, of any protocol, that the flow tables remember; it is
  *opened* by the client's first packet and stays in the table for a while after its end. `FLOWS` counts the rows of `kpx flows`
  everywhere, `OPEN` those that have not ended. A *backend* is an endpoint of a Service, whether it takes traffic or not; a *slot* is the place of a backend in a set of a service port. A packet is
  *dropped* in silence, or *rejected* with an answer to its client; both are *unserved*.
- **Exit codes.** 0: success. 1: a failure: the agent is unhealthy or does not answer, `check`
  found an obstacle, or no Service has that name. 2: wrong usage. A reader that closes the
  pipe early (`| head`) is no error.
";

const SECTIONS: [Section; 5] = [
    Section {
        heading: "kpx status",
        about: "\
The agent's state on one screen: health and problems, the fill of maps, and packets that were translated,
dropped or rejected. With `-o wide` also packets that merely passed, and all devices, programs and maps. Ends with 1 if
the agent is not healthy. An agent whose API server is away stays healthy and ends with 0, because the node serves as before; `Health:` then says since when which changes do not reach it. A *notice* names what the host has and kpx does not obey; the agent stays healthy.
",
        example: "status",
        data: Some("status"),
    },
    Section {
        heading: "kpx services",
        about: "\
The Services, and their state in force. `BACKENDS` counts the backends that take traffic, of all listed ones; a pod counts once, whatever
its ports and families. An exclamation mark behind a port means that another Service holds one of its frontends; behind an external address, that host mode
[leaves the address to the network](host-mode.md#external-addresses). `-o wide` has the reason, and JSON `.notTaken`.
",
        example: "services",
        data: Some("services"),
    },
    Section {
        heading: "kpx backends",
        about: "\
The endpoints of Services, with and without traffic. `SETS` names the sets that give new flows a backend:
`cluster` for clients of the whole cluster, `local` under a traffic policy `Local`. In host mode a column `WAY` is added, here and in `kpx services`:
`direct`, `node port`, `tunnel` or `unreachable`.
",
        example: "backends",
        data: Some("backends"),
    },
    Section {
        heading: "kpx flows",
        about: "\
The flows that pass this node, which the agent reads from the kernel's tables. Most recently active first. `--state` (`half-closed` is the same as `halfClosed`) and `--namespace` select some. `SOURCE` is what the backend sees if
that is not what the client has: another address if it was masqueraded, or another port. `--service`, `--client` and
`--backend` select.
",
        example: "flows",
        data: Some("flows"),
    },
    Section {
        heading: "kpx devices",
        about: "The devices that carry programs, with their role. `noPod` says why a veth into another network namespace\n\
                that may be a pod's counts as no pod's.\n",
        example: "devices",
        data: Some("devices"),
    },
];

const CHECK: &str = "
## kpx check

Checks if this host is fit for kpx, and says how to mend it. It loads the programs and attaches them in a network
namespace of its own. It looks at capabilities, sysctls, CNI, other programs on the devices, leftovers of a kube-proxy,
ports, MTU, IPsec policies, routing rules and PREEMPT_RT. Ends with 1 if a line says `fail`.
With the flags of a `kpx run` (`--config`, `--kubeconfig`, `--context`, `--mode` and others) the check is of that run. `--mode host` checks what a [machine outside](host-mode.md) needs instead, and asks the API server; with `--tunnel tcp` also for the right to the tunnel.
";

const TAIL: &str = "
## End flows

`kpx flows --end` ends the flows that `--service`, `--client`, `--backend`, `--state` and `--namespace` select, or all with `--all`, and prints how many. The list of the same flags without `--end` shows them first.

```sh
kpx flows --client 10.244.1.7          # look
kpx flows --client 10.244.1.7 --end    # 3 flows ended
```

It is for the node's translations what `conntrack -D` is for netfilter's: the flow's packets meet none from then on, whether they took the stack or skipped it. A TCP packet in the middle of a connection opens no flow, so the client's
next one reaches no backend, and the connection is dead; its ends see that by a RST or by their time-outs. (With kube-proxy the kernel may take such a packet up again, and lead it to any backend.) A new connection, and the next datagram of
a UDP exchange, are decided about afresh: a client that nothing forbids comes back at once, perhaps to another backend. To ban a pod, [forbid it first](security.md#ban-a-pod).

The agent ends the flows, and only for root: members of the group of `--socket-group` may list. Connections of sockets that got their backend at `connect` ([socket-lb.md](socket-lb.md)) have no flow: end those with `ss -K`.

## Old names

These names were changed. Unless the row says otherwise, the old ones are shown beside the new ones, and go with the next release.

| where | old | new |
| --- | --- | --- |
| `kpx status -o json` | `.events.socket_led` | `.events.socket_translated` |
| | `.mapFill.NURSERY4`, `.mapFill.NURSERY6` | `.mapFill.HALF_OPEN_RING4`, `.mapFill.HALF_OPEN_RING6` |
| | `.tables.NAME.backends` | `.tables.NAME.slots` |
| | `.pods.led`; `led` in `.pods.pods[].way` | `.pods.bySockets`; `sockets` in `.pods.pods[].path` |
| | `.silentBackends[].isAside` | `.silentBackends[].isEjected` |
| | `.reasons.forged`; gone | `.reasons.spoofed` |
| | `.options.fastPath` with *whole connections*; gone | *bypass for connections* |
| | `.maps.NAME` (the kernel's ids) | none: `bpftool map` shows them |
| `kpx services`, `backends`, `top` `-o json` | `.flows`, the open flows | `.openFlows`; `.flows` counts all rows of `kpx flows` |
| `kpx services`, `backends` `-o json` | `.setAside` of a backend | `.ejected` |
| `kpx services -o json` | `[].ports[].counts.refused` | the sum of `dropped` and `rejected` beside it |
| `kpx top` | `--sort connections`, `--sort refused` | `--sort opened`, `--sort unserved` |
| `kpx monitor` | `--drops` | `--unserved` |
| `kpx monitor --reason`, `kpx explain` | `forged`; outputs have the new name alone | `spoofed` |
| metrics | `map=\"NURSERY4\"`, `map=\"NURSERY6\"` of `kpx_map_entries` and `kpx_map_max_entries` | `map=\"HALF_OPEN_RING4\"`, `map=\"HALF_OPEN_RING6\"` |
| | `kpx_mended_total` | `kpx_repairs_total` |
| | `kpx_silent_backends{state=\"set_aside\"}` | `\"ejected\"` |
| | `kpx_untranslated_packets_total{reason=\"forged\"}`; gone, because sums over reasons would count packets twice | `\"spoofed\"` |
| | `kpx_packets_total{event=\"socket_led\"}` | `kpx_packets_total{event=\"socket_translated\"}` |

## Others

- `kpx trace` explains a packet: the programs' decision, its reasons, and the next steps where a packet is refused. Where it is forwarded, notes tell of flows that the backend
  refused or did not answer. It asks the kernel for devices and routes, so it runs in the
  agent's network namespace and refuses any other. `--in-device` names the device by which the packet arrives. On manifests its notes name each frontend that a Service claims and another one holds. Its ends are addresses or names:
  `--from pod/shop/cart-0 --to svc/shop/web:http`, `--from node/n1 --to web.shop.svc:80`, `--to deploy/shop/web:8080`. Pods are known by the endpoints of Services.
- `kpx explain [REASON]` says what a reason means and what to do; without a reason it lists all.
- `kpx events [SERVICE]` lists the Events that the agent sent to the API server, or would have sent, and the beginning, change and end of its own problems; the newest comes last.
  Those of a Service are its own, and those of its EndpointSlices, of LocalRedirects of its namespace, of pods that answer for it, and of its health check.
  The last 1,000 are kept while it runs, in at most 3 MiB; equal ones are counted. Once there is no room, the namespace with the most gives way. With `-o json`: `firstSeen`, `lastSeen`, `count`, `type`,
  `reason`, `kind`, `namespace`, `name`, `note`, `services` (those that it concerns, at most four beside its object).
- `kpx top` shows the traffic of each Service, live in a terminal, as one table elsewhere or with `--once`. There, Enter shows the backends of a Service and Escape all Services
  again; `kpx top SERVICE` begins with its backends. `--filter TEXT` selects Services by name, `--interval SECONDS` sets the time between samples. A terminal of less than 120 columns leaves the connect times and failures out. `-o json` and `-o yaml` are `--once` as
  data: `nodeName`, `health`, `problems`, `intervalSecs`, `services`, `backends` (of the Service that was named), `total`, `unservedReasons`.
- `kpx monitor` shows packets that open flows, are dropped or rejected; `--decisions` only the first, `--unserved` the others. `--limit-per-second N` counts lines beyond N as lost. With `-o json` each is a line: `time`, `what`
  (`decision`, `drop`, `reject`, or `lost` with how many were), `reason`, `hook`, `ifindex`, `device`, `protocol`, `client`,
  `dialled`, and `decision` with `kind`, `service`, `namespace`, `name`, `portName`, `origin`, `set`, `backend`, `affinity`,
  `source`, `masquerade`. Unknown values are null. `--since 5m` shows those of the past first, and with `--no-follow` them alone. The agent keeps them only if it is asked to: `kpx run --monitor-history`
  keeps the last 10,000 that opened flows and the last 10,000 that were refused, each in less than 1 KiB, and costs what a `kpx monitor` that never ends costs.
- `kpx cleanup` removes everything that a kpx of any version left, and names each thing. With `--kube-proxy` it also removes what
  kube-proxy left, and only that while a kpx runs. Otherwise it refuses while a kpx runs. With `--drain` it first leaves
  new connections to kube-proxy and waits for the end of open ones, `--timeout` at most ([migration.md](migration.md)).
- `kpx sysdump` gathers what a bug report needs of this node in one archive, whose file `CONTENTS` lists the parts. `kpx cluster COMMAND`, which is
  `kubectl kpx COMMAND`, asks the kpx of every node: `status`, `services`, `backends`, `flows`, `events`, `top`, `monitor`, `trace`, `connectivity-test`, `sysdump`, `version` ([kubectl.md](kubectl.md)).
- `kpx version` prints the version of this program and of the running agent; `kpx man [--dir DIR]` prints the manual pages.
";
