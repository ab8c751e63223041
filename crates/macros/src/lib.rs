//! The attribute of BPF global functions.

use proc_macro2::TokenStream;
use quote::{format_ident, quote};
use syn::parse::Parser;
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::{
    Error, FnArg, GenericParam, Ident, ItemFn, Pat, PatIdent, Result, ReturnType, Token, Type,
    parse_quote, parse2,
};

/// Makes a function a BPF global function, which the verifier checks once per program: see
/// `global_fn.rs` in proxy-ebpf.
///
/// The arguments are the exported names: of the function itself, or of its instances for IPv4 and
/// for IPv6 if it is generic over the address family. Names begin with `kpx_`, which no library's
/// symbol does.
///
/// Callers see the function as it is written. Its result and its arguments cross the call in
/// registers, of which BPF has five for arguments:
///
/// - `&A`, where `A` is the family: an address in one register for IPv4, in two for IPv6
/// - `Memory`: no register, because the function takes the hook's memory again, which its caller
///   lends it for the call
/// - all others: `InRegister`
#[proc_macro_attribute]
pub fn global_fn(
    names: proc_macro::TokenStream,
    item: proc_macro::TokenStream,
) -> proc_macro::TokenStream {
    expand(names.into(), item.into())
        .unwrap_or_else(Error::into_compile_error)
        .into()
}

/// The registers for arguments.
const MOST_REGISTERS: usize = 5;

/// An argument's way into the exported function.
enum Way {
    /// The address family's own form.
    Address,
    Memory,
    Register(Box<Type>),
}

struct Argument {
    name: Ident,
    way: Way,
}

impl Argument {
    /// Returns the registers that the argument takes, in the family that takes most.
    fn registers(&self) -> usize {
        match self.way {
            Way::Address => 2,
            Way::Memory => 0,
            Way::Register(_) => 1,
        }
    }
}

/// The exported function of a family, or of a function without families.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Instance {
    Ipv4,
    Ipv6,
    Only,
}

fn expand(names: TokenStream, item: TokenStream) -> Result<TokenStream> {
    let names: Vec<Ident> = Punctuated::<Ident, Token![,]>::parse_terminated
        .parse2(names)?
        .into_iter()
        .collect();
    let mut function: ItemFn = parse2(item)?;
    let family = match function.sig.generics.params.first() {
        Some(GenericParam::Type(family)) => Some(family.ident.clone()),
        _ => None,
    };
    let arguments = arguments(&function, family.as_ref())?;
    let registers: usize = arguments.iter().map(Argument::registers).sum();
    if registers > MOST_REGISTERS {
        let why = format!("the arguments take {registers} registers, of which BPF has five");
        return Err(Error::new(function.sig.span(), why));
    }
    let result: Type = match &function.sig.output {
        ReturnType::Default => parse_quote!(()),
        ReturnType::Type(_, result) => (**result).clone(),
    };
    let instances: &[Instance] = match (names.len(), &family) {
        (1, None) => &[Instance::Only],
        (2, Some(_)) => &[Instance::Ipv4, Instance::Ipv6],
        _ => {
            let why = "one name for a function, two for a function of both address families";
            return Err(Error::new(function.sig.span(), why));
        }
    };
    let exported: TokenStream = names
        .iter()
        .zip(instances)
        .map(|(name, instance)| export(name, *instance, &arguments, &result))
        .collect();
    let call = call(&names, family.as_ref(), &arguments, &result);

    let mut body = function.clone();
    body.attrs.clear();
    body.vis = syn::Visibility::Inherited;
    body.sig.ident = format_ident!("body");
    for (input, argument) in function.sig.inputs.iter_mut().zip(&arguments) {
        if let FnArg::Typed(input) = input {
            let name = &argument.name;
            *input.pat = parse_quote!(#name);
        }
    }
    function.block = parse_quote!({
        #[inline(always)]
        #body
        #exported
        #call
    });
    Ok(quote! {
        #[inline(always)]
        #function
    })
}

fn arguments(function: &ItemFn, family: Option<&Ident>) -> Result<Vec<Argument>> {
    let argument = |input: &FnArg| {
        let FnArg::Typed(input) = input else {
            return Err(Error::new(input.span(), "a global function has no `self`"));
        };
        let Pat::Ident(PatIdent { ident, .. }) = &*input.pat else {
            return Err(Error::new(input.span(), "an argument needs a name"));
        };
        Ok(Argument {
            name: ident.clone(),
            way: way(&input.ty, family),
        })
    };
    function.sig.inputs.iter().map(argument).collect()
}

fn way(of: &Type, family: Option<&Ident>) -> Way {
    match of {
        Type::Reference(to) if is(&to.elem, family) => Way::Address,
        Type::Path(path)
            if path
                .path
                .segments
                .last()
                .is_some_and(|last| last.ident == "Memory") =>
        {
            Way::Memory
        }
        _ => Way::Register(Box::new(of.clone())),
    }
}

fn is(of: &Type, family: Option<&Ident>) -> bool {
    matches!((of, family), (Type::Path(path), Some(family)) if path.path.is_ident(family))
}

/// Returns the exported function, which calls `body`.
fn export(name: &Ident, instance: Instance, arguments: &[Argument], result: &Type) -> TokenStream {
    let mut parameters = TokenStream::new();
    let mut values = TokenStream::new();
    for Argument { name, way } in arguments {
        match way {
            Way::Address if instance == Instance::Ipv4 => {
                parameters.extend(quote!(#name: u32,));
                values.extend(quote!(&::proxy_common::addr::Addr4::from_wire(#name),));
            }
            Way::Address => {
                let [first, second] = halves(name);
                parameters.extend(quote!(#first: u64, #second: u64,));
                values.extend(quote! {
                    &<::proxy_common::addr::Addr6 as ::proxy_common::addr::Addr>
                        ::from_registers([#first, #second]),
                });
            }
            Way::Memory => values.extend(quote!(crate::global_fn::memory(),)),
            Way::Register(of) => {
                parameters.extend(quote!(#name: <#of as crate::global_fn::InRegister>::Register,));
                values.extend(quote! {
                    <#of as crate::global_fn::InRegister>::from_register(#name),
                });
            }
        }
    }
    let family = match instance {
        Instance::Ipv4 => quote!(::<::proxy_common::addr::Addr4>),
        Instance::Ipv6 => quote!(::<::proxy_common::addr::Addr6>),
        Instance::Only => quote!(),
    };
    quote! {
        #[inline(never)]
        // SAFETY: the compiler refuses a second function of this name.
        #[unsafe(no_mangle)]
        extern "C" fn #name(#parameters) -> <#result as crate::global_fn::InRegister>::Register {
            crate::global_fn::InRegister::into_register(body #family(#values))
        }
    }
}

/// Returns the call of the exported function, of the family's if there are two.
fn call(
    names: &[Ident],
    family: Option<&Ident>,
    arguments: &[Argument],
    result: &Type,
) -> TokenStream {
    let mut before = TokenStream::new();
    let mut ipv4 = TokenStream::new();
    let mut ipv6 = TokenStream::new();
    for Argument { name, way } in arguments {
        match way {
            Way::Address => {
                let [first, second] = halves(name);
                before.extend(quote! {
                    let [#first, #second] = ::proxy_common::addr::Addr::registers(*#name);
                });
                ipv4.extend(quote!(#first as u32,));
                ipv6.extend(quote!(#first, #second,));
            }
            Way::Memory => before.extend(quote!(let _lent = #name;)),
            Way::Register(_) => {
                before.extend(quote! {
                    let #name = crate::global_fn::InRegister::into_register(#name);
                });
                ipv4.extend(quote!(#name,));
                ipv6.extend(quote!(#name,));
            }
        }
    }
    let call = match (names, family) {
        ([of_ipv4, of_ipv6], Some(family)) => quote! {
            if <#family as ::proxy_common::addr::Addr>::IS_IPV4 { #of_ipv4(#ipv4) } else { #of_ipv6(#ipv6) }
        },
        _ => {
            let name = &names[0];
            quote!(#name(#ipv4))
        }
    };
    quote! {
        #before
        <#result as crate::global_fn::InRegister>::from_register(#call)
    }
}

/// Returns the names of an IPv6 address's two registers.
fn halves(name: &Ident) -> [Ident; 2] {
    [
        format_ident!("{name}_first"),
        format_ident!("{name}_second"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(names: TokenStream, item: TokenStream) -> String {
        match expand(names, item) {
            Ok(tokens) => tokens.to_string().replace(' ', ""),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn each_family_has_an_export_and_memory_is_taken_again() {
        let text = expanded(
            quote!(kpx_draw4, kpx_draw6),
            quote! {
                fn draw<A: Net>(src: &A, dst: &A, rest: u64, memory: Memory) -> bool { true }
            },
        );
        let rest = "rest:<u64ascrate::global_fn::InRegister>::Register,";
        for export in [
            format!("fnkpx_draw4(src:u32,dst:u32,{rest})"),
            format!(
                "fnkpx_draw6(src_first:u64,src_second:u64,dst_first:u64,dst_second:u64,{rest})"
            ),
        ] {
            assert!(text.contains(&export), "{export} in {text}");
        }
        assert_eq!(text.matches("crate::global_fn::memory()").count(), 2);
    }

    #[test]
    fn what_cannot_be_exported_is_refused_with_the_reason() {
        let one = quote!(kpx_one);
        let two = quote!(kpx_one4, kpx_one6);
        for (names, item, why) in [
            (
                &one,
                quote!(
                    fn one<A: Net>(at: &A) {}
                ),
                "two for a function of both",
            ),
            (
                &two,
                quote!(
                    fn one(at: u32) {}
                ),
                "one name for a function",
            ),
            (
                &one,
                quote!(
                    fn one(self) {}
                ),
                "has no `self`",
            ),
            (
                &one,
                quote!(
                    fn one((a, b): (u8, u8)) {}
                ),
                "needs a name",
            ),
            (
                &two,
                quote!(
                    fn one<A: Net>(skb: Skb, src: &A, dst: &A, mark: u32) {}
                ),
                "take 6 registers",
            ),
        ] {
            let error = expanded(names.clone(), item);
            assert!(error.contains(why), "{error}");
        }
    }
}
