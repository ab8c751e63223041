//! The lab as a picture, and its Services as a table.

use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use testbed::agent::Service;
use testbed::lab::{Host, Lab, Node};

pub(crate) fn draw(lab: &Lab) -> String {
    let mut lines = vec![
        line("", &lab.x, "a machine outside"),
        line("", &lab.ext, "a server outside"),
    ];
    lines.push("  │".to_owned());
    lines.push(line(
        "",
        &lab.fabric,
        "routes between nodes and outside, and knows no pods",
    ));
    for (nth, node) in lab.nodes().into_iter().enumerate() {
        let last = nth + 1 == lab.nodes().len();
        lines.push(line(
            if last { "  └─ " } else { "  ├─ " },
            &node.host,
            "a node",
        ));
        lines.extend(pods(node, if last { "     " } else { "  │  " }));
    }
    lines.push(String::new());
    lines.join("\n")
}

fn pods(node: &Node, indent: &str) -> Vec<String> {
    let line_of = |(nth, pod): (usize, &Host)| {
        let branch = if nth + 1 == node.pods.len() {
            "└─ "
        } else {
            "├─ "
        };
        line(&format!("{indent}   {branch}"), pod, "a pod")
    };
    node.pods.iter().enumerate().map(line_of).collect()
}

fn line(indent: &str, host: &Host, what: &str) -> String {
    let label = format!("{indent}{}", host.name);
    format!("  {label:14} {:42} {what}", host.addrs.to_string())
}

pub(crate) fn services(services: &[Service]) -> Table {
    let mut table = Table::new();
    table
        .load_style(UTF8_FULL_CONDENSED)
        .set_header(["service", "ClusterIPs", "backends"]);
    for service in services {
        let backends = if service.backends.is_empty() {
            "none".to_owned()
        } else {
            service.backends.join(", ")
        };
        table.add_row([
            service.name.to_owned(),
            service.cluster_ip().to_string(),
            backends,
        ]);
    }
    table
}
