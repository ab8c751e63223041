//! Every command of kpx as an operator meets it. What it prints is compared letter by letter with
//! docs/cli.md, which is made of it: `UPDATE_EXPECT=1` writes it again.

mod cleanup;
mod config;
mod document;
mod ends;
mod flows;
mod kubeconfig;
mod lists;
mod node;
mod numbers;
mod schema;
mod sysdump;
