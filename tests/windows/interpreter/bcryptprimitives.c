/* bcryptprimitives.dll, which Wine 8 lacks: the random numbers of programs in Rust (safetensors, tokenizers). */
#include <windows.h>

BOOLEAN NTAPI SystemFunction036(PVOID, ULONG);

__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE data, SIZE_T size) { return SystemFunction036(data, (ULONG)size); }
