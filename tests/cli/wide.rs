//! The wider tables, and YAML.

use anyhow::Result;
use expect_test::expect_file;

use crate::document::masked;
use crate::node::Node;

#[test]
fn wide_tables_and_yaml_show_more() -> Result<()> {
    let node = Node::start("wide", "")?;
    let _connection = node.connect()?;
    let mut text = String::new();
    for command in ["services -o wide", "backends web -o wide", "flows -o wide", "services kube-dns -o yaml"] {
        text += &format!("$ kpx {command}\n{}\n", masked(&node.text(command)?));
    }
    // What passed is whatever the kernel happened to send, and maps are the programs' matter.
    let status = node.text("status -o wide")?;
    let parts: Vec<_> = status.split("\n\n").filter(|part| !part.starts_with("MAP ")).collect();
    assert!(parts.iter().any(|part| part.starts_with("PROGRAM")), "{status}");
    assert!(parts.iter().any(|part| part.starts_with("DEVICE   IFINDEX   ROLE")), "{status}");
    for program in ["kpx_anchor", "kpx_egress", "kpx_ingress", "kpx_lo"] {
        assert!(status.contains(program), "{program} in {status}");
    }
    expect_file!["wide.txt"].assert_eq(&text);
    Ok(())
}
