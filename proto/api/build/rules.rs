//! From the rules in the protocol files to the table and the trait implementations that the programs go by.

use std::fmt::Write as _;

use protox::prost_reflect::{
    DescriptorPool, DynamicMessage, ExtensionDescriptor, Kind, MessageDescriptor, MethodDescriptor,
    ReflectMessage as _,
};

/// The package whose methods need rules.
const PACKAGE: &str = "vmmd.v1";

/// Field number of `request_id` in every request that has one.
const REQUEST_ID: u32 = 15;

/// Field number of `preconditions` in every request that changes an object.
const PRECONDITIONS: u32 = 14;

/// Kinds of things that are objects: messages with an `ObjectMetadata`.
const OBJECTS: &[&str] = &["vm", "disk", "image", "network", "node"];

/// The content of `rules.rs`.
///
/// # Errors
///
/// Which method has no rule, or one that its messages contradict.
pub fn generate(pool: &DescriptorPool) -> Result<String, String> {
    let option = pool
        .get_extension_by_name("vmmd.v1.rule")
        .ok_or("the protocol files don't define the option vmmd.v1.rule")?;
    let (mut table, mut mutations) = (String::new(), String::new());
    for service in pool
        .services()
        .filter(|service| service.package_name() == PACKAGE)
    {
        for method in service.methods() {
            let rule =
                Rule::of(&method, &option).map_err(|problem| format!("{}: {problem}", method.full_name()))?;
            table += &rule.entry(&method);
            if rule.by_request_id() {
                mutations += &mutation(&method);
            }
        }
    }
    Ok(format!(
        "/// Field number of `request_id` in every request that has one.\n\
         pub const REQUEST_ID: u32 = {REQUEST_ID};\n\
         /// The rule of every method of the public API, in the order of the protocol files.\n\
         pub const METHOD_RULES: &[MethodRule] = &[\n{table}];\n{mutations}"
    ))
}

/// The service for daemons alone.
const PEERS: &str = "PeerService";

/// An option of one method, as the generated table says it.
struct Rule {
    role: String,
    /// `role` when the rule names none.
    masked_role: String,
    effect: String,
    peers: bool,
    agents: bool,
    idempotent: bool,
    kind: String,
    name: Vec<u32>,
}

impl Rule {
    fn of(method: &MethodDescriptor, option: &ExtensionDescriptor) -> Result<Self, String> {
        let options = method.options();
        if !options.has_extension(option) {
            return Err("has no rule: say `option (rule) = {role: …, effect: …}`".into());
        }
        let rule = options.get_extension(option);
        let rule = rule.as_message().ok_or("its rule is no message")?;
        let request = method.input();
        let role = value(rule, "role")?;
        let found = Self {
            masked_role: match rule.has_field_by_name("masked_role") {
                true => value(rule, "masked_role")?,
                false => role.clone(),
            },
            role,
            effect: value(rule, "effect")?,
            peers: flag(rule, "peers"),
            agents: flag(rule, "agents"),
            idempotent: flag(rule, "idempotent"),
            kind: text(rule, "kind"),
            name: numbers(&request, &text(rule, "name_field"))?,
        };
        let change = found.effect == "Change";
        if found.kind.is_empty() && change {
            return Err("changes something and does not say what kind of thing".into());
        }
        if found.kind.is_empty() && !found.name.is_empty() {
            return Err("has a `name_field` without a `kind`".into());
        }
        if found.peers && change && method.parent_service().name() != PEERS {
            return Err("lets peers change something, which only a method of PeerService may".into());
        }
        if found.agents && method.parent_service().name() == PEERS {
            return Err("lets agents call a method of PeerService".into());
        }
        let mask = request.get_field_by_name("update_mask").map(|field| field.kind());
        let is_mask = |kind: &Kind| match kind {
            Kind::Message(message) => message.full_name() == "google.protobuf.FieldMask",
            _ => false,
        };
        if rule.has_field_by_name("masked_role") && !mask.as_ref().is_some_and(is_mask) {
            return Err("has a `masked_role` and takes no `google.protobuf.FieldMask update_mask`".into());
        }
        if found.idempotent && !change {
            return Err("is `idempotent` without being a change".into());
        }
        match request.get_field_by_name("request_id") {
            Some(_) if !found.by_request_id() => {
                return Err("has a request_id, which only a change that is not `idempotent` needs".into());
            }
            Some(field) if field.number() != REQUEST_ID || field.kind() != Kind::String => {
                return Err(format!("its request_id is not the string {REQUEST_ID}"));
            }
            None if found.by_request_id() => return Err("changes something and takes no request_id".into()),
            _ => {}
        }
        found.check_preconditions(method)?;
        Ok(found)
    }

    /// Checks that exactly the methods that change an existing object take preconditions.
    fn check_preconditions(&self, method: &MethodDescriptor) -> Result<(), String> {
        let creates = ["Create", "Import"]
            .iter()
            .any(|verb| method.name().starts_with(verb));
        let needed = OBJECTS.contains(&self.kind.as_str()) && self.by_request_id() && !creates;
        let field = method.input().get_field_by_name("preconditions");
        match (field, needed) {
            (None, false) => Ok(()),
            (None, true) => Err(format!(
                "changes an object and takes no `Preconditions preconditions = {PRECONDITIONS}`"
            )),
            (Some(_), false) => Err("takes preconditions and changes no object".into()),
            (Some(field), true) => {
                let is_message = |kind: Kind| match kind {
                    Kind::Message(message) => message.full_name() == "vmmd.v1.Preconditions",
                    _ => false,
                };
                if field.number() == PRECONDITIONS && is_message(field.kind()) {
                    Ok(())
                } else {
                    Err(format!(
                        "its preconditions are not `Preconditions preconditions = {PRECONDITIONS}`"
                    ))
                }
            }
        }
    }

    /// Whether its request has an id by which it is carried out once.
    fn by_request_id(&self) -> bool {
        self.effect == "Change" && !self.idempotent
    }

    fn entry(&self, method: &MethodDescriptor) -> String {
        format!(
            "    MethodRule {{ method: {:?}, role: Role::{}, masked_role: Role::{}, peers: {}, agents: {}, \
             effect: MethodEffect::{}, kind: {:?}, name: &{:?}, client_streams: {}, server_streams: {} }},\n",
            format!("{}/{}", method.parent_service().full_name(), method.name()),
            self.role,
            self.masked_role,
            self.peers,
            self.agents,
            self.effect,
            self.kind,
            self.name,
            method.is_client_streaming(),
            method.is_server_streaming(),
        )
    }
}

/// Returns the value of an enum field in the generated code: `Viewer` of `ROLE_VIEWER`.
fn value(rule: &DynamicMessage, field: &str) -> Result<String, String> {
    let descriptor = rule.descriptor().get_field_by_name(field);
    let Some(Kind::Enum(known)) = descriptor.map(|field| field.kind()) else {
        return Err(format!("its rule has no enum {field}"));
    };
    let number = rule
        .get_field_by_name(field)
        .and_then(|value| value.as_enum_number())
        .unwrap_or_default();
    let prefix = known
        .values()
        .find_map(|value| value.name().strip_suffix("UNSPECIFIED").map(str::to_owned));
    let name = known.get_value(number).filter(|_| number != 0);
    let name = name.ok_or_else(|| format!("its rule says no {field}"))?;
    let name = name
        .name()
        .trim_start_matches(&prefix.unwrap_or_default())
        .to_owned();
    Ok(name.split('_').map(capitalized).collect())
}

fn capitalized(word: &str) -> String {
    let (first, rest) = word.split_at(word.len().min(1));
    format!("{first}{}", rest.to_ascii_lowercase())
}

fn flag(rule: &DynamicMessage, field: &str) -> bool {
    rule.get_field_by_name(field)
        .and_then(|value| value.as_bool())
        .unwrap_or_default()
}

fn text(rule: &DynamicMessage, field: &str) -> String {
    rule.get_field_by_name(field)
        .and_then(|value| value.as_str().map(str::to_owned))
        .unwrap_or_default()
}

/// The field numbers of a path such as `vm.metadata.name`, which leads to a string.
fn numbers(request: &MessageDescriptor, path: &str) -> Result<Vec<u32>, String> {
    if path.is_empty() {
        return Ok(Vec::new());
    }
    let mut numbers = Vec::new();
    let mut kind = Kind::Message(request.clone());
    for name in path.split('.') {
        let field = match &kind {
            Kind::Message(message) => message.get_field_by_name(name),
            _ => None,
        };
        let field = field.ok_or_else(|| format!("its request has no field {path}"))?;
        numbers.push(field.number());
        kind = field.kind();
    }
    match kind {
        Kind::String => Ok(numbers),
        _ => Err(format!("{path} is no string")),
    }
}

fn mutation(method: &MethodDescriptor) -> String {
    let request = method.input();
    let preconditions = match request.get_field_by_name("preconditions") {
        Some(_) => "self.preconditions.as_ref()",
        None => "None",
    };
    let dry_run = match request.get_field_by_name("dry_run") {
        Some(_) => "self.dry_run",
        None => "false",
    };
    let mut code = String::new();
    let _ = writeln!(code, "impl Mutation for v1::{} {{", request.name());
    let _ = writeln!(code, "    const METHOD: &'static str = {:?};", method.name());
    code += "    fn request_id(&self) -> &str { &self.request_id }\n";
    code += "    fn set_request_id(&mut self, id: String) { self.request_id = id; }\n";
    let _ = writeln!(
        code,
        "    fn preconditions(&self) -> Option<&v1::Preconditions> {{ {preconditions} }}"
    );
    let _ = writeln!(code, "    fn dry_run(&self) -> bool {{ {dry_run} }}");
    code += "}\n";
    code
}
