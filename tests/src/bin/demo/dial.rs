//! Who dials what, who answers, and whom the backend sees.

use anyhow::{Context, Result};
use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use kpx_tests::agent::Service;
use kpx_tests::echo::{Dial, Fault, Protocol, pattern};
use kpx_tests::lab::{Family, Lab};

/// Who, as people would say it; in which namespace; which service; must it be refused.
const CLIENTS: [(&str, &str, &str); 9] = [
    ("a pod", "p1a", "web"),
    ("a process of the node", "n1", "web"),
    ("a pod of the other node", "p2b", "web"),
    ("a pod, served by itself", "p1a", "itself"),
    ("a process, pod elsewhere", "n1", "far"),
    ("a pod, its own node", "p1a", "node"),
    ("a process, its own node", "n1", "node"),
    ("a pod, outside", "p1a", "outside"),
    ("a pod, no endpoints", "p1a", "nobody"),
];

/// Prints a table of conversations and returns how many went wrong.
pub(crate) fn everyone(lab: &Lab, services: &[Service]) -> Result<usize> {
    let mut table = Table::new();
    let header = ["client", "in", "dials", "", "IPv4: answers, and sees", "IPv6: answers, and sees"];
    table.load_preset(UTF8_FULL_CONDENSED).set_header(header);
    let mut wrong = 0;
    for (who, host, name) in CLIENTS {
        let service = services.iter().find(|service| service.name == name);
        let service = service.with_context(|| format!("no service {name}"))?;
        for protocol in Protocol::ALL {
            let mut row = vec![who.to_owned(), host.to_owned(), name.to_owned(), protocol.to_string()];
            for family in Family::ALL {
                let dial = Dial::new(protocol, service.frontend(family));
                let result = dial.exchange(&lab.host(host).ns, &pattern(10_000));
                row.push(match &result {
                    Ok(answer) => format!("{} sees {}", answer.backend, answer.source.ip()),
                    Err(fault) => fault.to_string(),
                });
                let expected = match &result {
                    Ok(answer) => service.backends.contains(&answer.backend.as_str()),
                    Err(fault) => service.backends.is_empty() && matches!(fault, Fault::Refused),
                };
                wrong += usize::from(!expected);
            }
            table.add_row(row);
        }
    }
    println!("\n{table}\n");
    Ok(wrong)
}
